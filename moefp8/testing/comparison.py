"""What `compare_models` returns."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Errors:
    """The `row_errors` of all rows, in short."""

    median: float
    worst: float


@dataclass(frozen=True)
class LayerComparison:
    """What one layer of `b` costs.

    name: of the layer in both models.
    kl: mean KL divergence of `a` with this layer of `b` from `a`, in nats a token.
    own: errors of what the layer returns on the input that it gets in `a`.
    total: errors of what the layer returns in `b`: its own and those of all layers before it.
    parts: name of a part that holds FP8 modules -> its errors, on the input that it gets in `a`.
    """

    name: str
    kl: float
    own: Errors
    total: Errors
    parts: dict[str, Errors]


@dataclass(frozen=True)
class Comparison:
    """How far `b` is from `a`.

    num_tokens: positions that have a label; all but errors of layers are of these.
    perplexity_a, perplexity_b: exp of the mean cross entropy of labels.
    change: of the perplexity, relative; 0.01 is one percent worse.
    change_std: standard error of `change`, from the differences at single positions.
    kl_mean, kl_max: KL(a || b), in nats a token.
    kl_floor: mean KL of `a` from `a` whose first layer's result is rounded otherwise in its last
        bit. A KL divergence that is not larger says nothing: BF16 does as much.
    same_top_1: share of positions at which both prefer the same token.
    logits: errors of a position's logits.
    layers: in their order; those that are not called are left out.
    """

    num_tokens: int
    perplexity_a: float
    perplexity_b: float
    change: float
    change_std: float
    kl_mean: float
    kl_max: float
    kl_floor: float
    same_top_1: float
    logits: Errors
    layers: list[LayerComparison]

    @property
    def costliest(self) -> LayerComparison:
        """The layer with the largest `kl`."""
        return max(self.layers, key=lambda layer: layer.kl)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON has them."""
        return asdict(self)
