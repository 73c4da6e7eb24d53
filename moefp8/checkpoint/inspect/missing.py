"""Find layers and experts that are missing, by config.json and by the other layers.

A tensor that cannot be read counts as present, since its file is reported as broken.
"""

from collections.abc import Collection, Iterator
from itertools import islice

from ..files.config import is_leftover, layer_of, number_in, text_config
from ..files.names import folded
from .anomalies import NUM_EXAMPLES, Anomaly
from .contents import Contents

EXPERTS_NAMES = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"
_ZERO_EXPERTS = ("zero_expert_num",)  # these return their input; a stack may hold rows for them


def num_experts_of(contents: Contents) -> int | None:
    """Return E of config.json, else by the largest number of an expert, or the largest stack."""
    modules = contents.expert_numbers.values()
    counts = [n + 1 for leaves in modules for numbers in leaves.values() for n in numbers]
    counts += [x.shape[0] for name, x in contents.weights.items() if _is_fused(name, x.shape)]
    return number_in(contents.config, EXPERTS_NAMES) or max(counts, default=None)


def missing_experts(contents: Contents) -> Iterator[Anomaly]:
    """Find experts that are missing or too many, and routers that have no experts at all."""
    num_experts = num_experts_of(contents) or 0
    most = _num_sorts(contents) * num_experts + (number_in(contents.config, _ZERO_EXPERTS) or 0)
    modules = contents.expert_numbers
    leaves = sorted({leaf for numbers in modules.values() for leaf in numbers})
    for module, numbers in modules.items():
        for leaf in leaves:
            ends = f"{module}.", f".{leaf}"
            present, kind = numbers.get(leaf, ()), folded("0".join(ends))
            yield from _compare(contents, "experts", kind, ends, present, num_experts, most)

    allowed = {num_experts, most, *_sizes_of_layers(contents)}
    named = (name for name in (*modules, *contents.named) if ".mlp." in name)
    experts = (name for name in named if ".experts." in f"{name}.")
    with_experts = {name.partition(".mlp.")[0] + ".mlp" for name in experts}
    for name, entry in contents.weights.items():
        if _is_fused(name, entry.shape) and entry.shape[0] not in allowed:
            sizes = " or ".join(map(str, sorted(allowed)))
            text = f"{entry}: {entry.shape[0]} experts, config.json tells of {sizes}"
            yield Anomaly("error", "experts are missing, or too many", folded(name), (text,))
        block = name.removesuffix(".gate.weight")
        is_router = name.endswith(".mlp.gate.weight") and not is_leftover(contents.config, name)
        if is_router and block not in with_experts:
            text = f"{entry}: no {block}.experts.*"
            yield Anomaly("error", "a router without experts", folded(name), (text,))


def missing_layers(contents: Contents) -> Iterator[Anomaly]:
    present = {n for name in contents.kept if (n := layer_of(name)) is not None}
    if present:
        num = number_in(contents.config, ["num_hidden_layers"]) or max(present) + 1
        yield from _compare(contents, "layers", "layers.*", ("layers.", ".*"), present, num, num)


def _compare(
    contents: Contents,
    what: str,
    kind: str,
    ends: tuple[str, str],
    present: Collection[int],
    wanted: int,
    most: int,
) -> Iterator[Anomaly]:
    """Find numbers below `wanted` that are not present, and those from `most` on that are.

    ends: the text before and after a number.
    """
    path, (before, after) = contents.scan.source.path, ends
    if num_missing := wanted - sum(n < wanted for n in present):
        absent = islice((n for n in range(wanted) if n not in present), NUM_EXAMPLES)
        examples = tuple(f"{before}{n}{after}: missing from {path}" for n in absent)
        yield Anomaly("error", f"{what} are missing", kind, examples, num_missing)
    for n in sorted(n for n in present if n >= most):
        text = f"{before}{n}{after} in {path}: config.json tells of {wanted}"
        yield Anomaly("error", f"more {what} than config.json tells of", kind, (text,))


def _num_sorts(contents: Contents) -> int:
    """Count the sorts of experts: ERNIE 4.5 VL numbers as many again for images."""
    sizes = text_config(contents.config).get("moe_intermediate_size")
    return len(sizes) if isinstance(sizes, list) and sizes else 1


def _sizes_of_layers(contents: Contents) -> Iterator[int]:
    """Yield each E that config.json has for a single layer: Dots 3 has more in later ones."""
    layers = text_config(contents.config).get("per_layer_config")
    for layer in layers.values() if isinstance(layers, dict) else ():
        if isinstance(layer, dict) and (number := number_in(layer, EXPERTS_NAMES)):
            yield number


def _is_fused(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(".experts.down_proj") and len(shape) == 3
