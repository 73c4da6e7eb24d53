"""Find what a checkpoint stores in FP8, by its scales, never by lists in its config.

Only headers are read; modules are listed by name, or made in the same sizes without weights.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ...layers import FP8Linear, GroupedExperts, TopKRouter
from ...layers.conversion.stacks import stacks_of
from ...layers.moe import SharedExperts
from ...layers.router import TOP_K_NAMES
from ..errors import CheckpointError
from ..files.config import is_leftover, number_in, text_config
from ..files.header import FP8, TORCH_DTYPES, Entry
from ..files.names import Rename, canonical, renamed, split_expert, weight_of_scale
from ..files.source import Source, disagreement, kept_entries, open_source
from ..model.slots import Inventory

_BIASES = "BF16", "F16", "F32"


def fp8_modules(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    ignore: Iterable[str] = (),
    rename: Rename | None = None,
) -> list[str]:
    """List the modules whose weights have a scale, for `convert(model, only=...)`.

    With model, the names are the model's own where families spell them differently (a
    checkpoint's `block_sparse_moe.experts` may be a model's `mlp.experts`); without, the
    checkpoint's. path, ignore, rename: as in load_checkpoint. Raises CheckpointError.
    """
    return fp8_modules_of(open_source(path), model, ignore, rename)


def fp8_modules_of(
    source: Source,
    model: nn.Module | None,
    ignore: Iterable[str] = (),
    rename: Rename | None = None,
) -> list[str]:
    """Do the work of `fp8_modules` for a checkpoint that is open."""
    weights = _scaled_weights(source, ignore, rename)
    if model is None:
        experts = ((name, split_expert(name)) for name in weights.values())
        return list(dict.fromkeys(x[0] if x else name.rpartition(".")[0] for name, x in experts))
    inventory = Inventory(model)
    modules: dict[str, None] = {}
    for key, name in weights.items():
        slot = inventory.find(name)
        module = _experts_to_be(model, name) if slot is None else slot.module
        if module is None:
            raise CheckpointError(f"{source.entries[key]}: FP8, but the model has no such weight")
        modules[module] = None
    return list(modules)


def _experts_to_be(model: nn.Module, weight: str) -> str | None:
    """Return the experts whose weights have another name now, and this one after `convert`."""
    name, _, leaf = weight.rpartition(".")
    module = dict(model.named_modules()).get(name)
    if module is None or leaf not in GroupedExperts.fp8_names:
        return None
    return name if stacks_of(module) is not None else None


def _scaled_weights(
    source: Source, ignore: Iterable[str] = (), rename: Rename | None = None
) -> dict[str, str]:
    """Return checkpoint key -> model name for every weight that has a scale."""
    names = {
        renamed(key, rename): key
        for key in kept_entries(source, ignore)
        if not is_leftover(source.config, key)
    }
    weights = (weight_of_scale(name) for name in names)
    return {names[weight]: weight for weight in weights if weight in names}


class Layers(nn.ModuleList):
    """One module of each class and size, on the meta device.

    names: the checkpoint's key for the first one of each.
    """

    def __init__(self, modules: Mapping[nn.Module, str], top_k: int | None) -> None:
        super().__init__(modules)
        self.names = list(modules.values())
        self.top_k = top_k  # experts of a token; None: config.json does not say


def fp8_layers(path: str | os.PathLike[str], top_k: int | None = None) -> Layers:
    """Make one module of each class and size in FP8; only headers and config.json are read.

    path: as in load_checkpoint. top_k: experts of a token; None: as config.json says.
    Routers are made if top_k is known. Raises CheckpointError, naming keys; ValueError for a top_k
    that is not 1 to the number of experts.
    """
    source = open_source(path)
    if problem := disagreement(source, source.entries.values()):
        raise CheckpointError(f"{path}: {problem}")
    weights = _scaled_weights(source).items()
    names = {key: canonical(name) for key, name in weights if source.entries[key].dtype == FP8}
    if not names:
        raise CheckpointError(
            f"{path}: no {FP8} weight has scales, so there is nothing in FP8; "
            "`python -m moefp8 quantize` makes an FP8 checkpoint of one in 16 bits"
        )
    layers: dict[tuple[Any, ...], Entry] = {}
    for kind, sizes, bias, entry in _layers(source, names):
        layers.setdefault((kind, sizes, bias), entry)
    experts = {sizes: entry for (kind, sizes, _), entry in layers.items() if kind is GroupedExperts}
    _check_top_k(top_k, experts)
    top_k = number_in(source.config, TOP_K_NAMES) if top_k is None else top_k
    modules: dict[nn.Module, str] = {}
    for (kind, sizes, bias), entry in layers.items():
        options: dict[str, Any] = {"bias": bias is not None} if kind is FP8Linear else {}
        options |= {} if bias is None else {"dtype": TORCH_DTYPES[bias]}
        modules[_made(entry, kind, *sizes, **options)] = entry.key
        if kind is GroupedExperts and top_k is not None:
            num_experts, hidden_size, _ = sizes
            sizes = hidden_size, num_experts, min(top_k, num_experts)
            modules[_made(entry, TopKRouter, *sizes, scoring=_scoring(source))] = entry.key
    return Layers(modules, top_k)


def _layers(
    source: Source, names: Mapping[str, str]
) -> Iterator[tuple[type[nn.Module], tuple[int, ...], str | None, Entry]]:
    """Yield (class, sizes as it takes them, dtype of the bias, weight) for every layer.

    Sizes are (K, N) of linears, (H, I) of shared experts, (E, H, I) of routed ones, stored one by
    one or fused; the weight of experts is one of their down projections.
    """
    numbers: dict[str, int] = defaultdict(int)
    downs: dict[str, Entry] = {}
    for key, name in names.items():
        entry, expert = source.entries[key], split_expert(name)
        if expert is not None:
            module, index = expert
            numbers[module] = max(numbers[module], index + 1)
            if name.endswith(".down_proj.weight"):
                downs[module] = entry
        elif len(entry.shape) == 3 and name.endswith("down_proj"):
            yield GroupedExperts, entry.shape, None, entry
        elif len(entry.shape) == 2:
            bias = source.entries.get(f"{key.removesuffix('.weight')}.bias")
            if bias is not None and bias.dtype not in _BIASES:
                raise CheckpointError(
                    f"{bias}: dtype of a bias must be one of {', '.join(_BIASES)}, got {bias.dtype}"
                )
            yield FP8Linear, entry.shape[::-1], None if bias is None else bias.dtype, entry
        if name.endswith(".shared_experts.down_proj.weight"):
            yield SharedExperts, _matrix(entry), None, entry
    for module, entry in downs.items():
        yield GroupedExperts, (numbers[module], *_matrix(entry)), None, entry


def _check_top_k(top_k: int | None, experts: Mapping[tuple[int, ...], Entry]) -> None:
    for (num_experts, _, _), entry in experts.items():
        if top_k is not None and top_k > num_experts:
            raise ValueError(
                f"top_k must be at most the number of experts, which is {num_experts} in "
                f"{entry.key}, got {top_k}"
            )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")


def _made(entry: Entry, kind: type[nn.Module], *sizes: int, **options: Any) -> nn.Module:
    """Make a module, which takes no memory; PyTorch refuses more bytes than it can count."""
    try:
        return kind(*sizes, device="meta", **options)
    except (RuntimeError, OverflowError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{entry}: shape {list(entry.shape)} is of no {kind.__name__} ({error})"
        ) from error


def _scoring(source: Source) -> str:
    """Return "sigmoid" if a bias corrects the scores of routers, or config.json says so."""
    corrected = any(key.endswith("e_score_correction_bias") for key in source.entries)
    is_sigmoid = text_config(source.config).get("scoring_func") == "sigmoid"
    return "sigmoid" if corrected or is_sigmoid else "softmax"


def _matrix(entry: Entry) -> tuple[int, ...]:
    if len(entry.shape) != 2:
        raise CheckpointError(f"{entry}: must have two dimensions, got {list(entry.shape)}")
    return entry.shape
