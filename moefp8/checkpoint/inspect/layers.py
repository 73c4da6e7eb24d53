"""Make modules of the sizes of a checkpoint's FP8 layers, without weights, from headers alone."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ...layers import FP8Linear, GroupedExperts, TopKRouter
from ...layers.moe import SharedExperts
from ...layers.router import TOP_K_NAMES
from ..errors import CheckpointError
from ..files.config import text_config, told
from ..files.header import FP8, TORCH_DTYPES, Entry
from ..files.names import canonical, split_expert
from ..files.source import Source, open_source
from .fp8 import scaled_weights

_BIASES = "BF16", "F16", "F32"


class Layers(nn.ModuleList):
    """One module of each class and size, on the meta device.

    names: what the checkpoint calls the first one of each.
    """

    def __init__(self, modules: Mapping[nn.Module, str], top_k: int | None) -> None:
        super().__init__(modules)
        self.names = list(modules.values())
        self.top_k = top_k  # experts of a token; None: config.json does not say


def fp8_layers(path: str | os.PathLike[str], top_k: int | None = None) -> Layers:
    """Make one module of each class and size in FP8; only headers and config.json are read.

    path: as in load_checkpoint. top_k: experts of a token; None: as config.json says.
    There are routers if top_k is known. Raises CheckpointError, naming keys; ValueError for a top_k
    that is not 1 to the number of experts.
    """
    source = open_source(path)
    weights = scaled_weights(source).items()
    names = {key: canonical(name) for key, name in weights if source.entries[key].dtype == FP8}
    if not names:
        raise CheckpointError(f"{path}: no {FP8} weight has scales, so there is nothing in FP8")
    experts = _experts(source, names)
    _check_top_k(top_k, experts)
    top_k = told(source.config, TOP_K_NAMES) if top_k is None else top_k
    modules: dict[nn.Module, str] = {}
    for (n, k, bias), entry in _linears(source, names).items():
        dtype = {} if bias is None else {"dtype": TORCH_DTYPES[bias]}
        modules[_made(entry, FP8Linear, k, n, bias is not None, **dtype)] = entry.key
    for sizes, entry in _shared(source, names).items():
        modules[_made(entry, SharedExperts, *sizes)] = entry.key
    for of, entry in experts.items():
        modules[_made(entry, GroupedExperts, *of)] = entry.key
        if top_k is not None:
            modules[_router(source, entry, of, top_k)] = entry.key
    return Layers(modules, top_k)


def _check_top_k(top_k: int | None, experts: Mapping[tuple[int, int, int], Entry]) -> None:
    for (num_experts, _, _), entry in experts.items():
        if top_k is not None and top_k > num_experts:
            raise ValueError(
                f"top_k must be at most the number of experts, which is {num_experts} in "
                f"{entry.key}, got {top_k}"
            )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")


def _made(entry: Entry, kind: Callable[..., nn.Module], *sizes: int, **options: Any) -> nn.Module:
    """Make a module, which takes no memory; PyTorch refuses more bytes than it can count."""
    try:
        return kind(*sizes, device="meta", **options)
    except (RuntimeError, OverflowError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{entry}: shape {list(entry.shape)} is of no {kind.__name__} ({error})"
        ) from error


def _router(source: Source, entry: Entry, of: tuple[int, int, int], top_k: int) -> nn.Module:
    """Make a router; it scores by the sigmoid if a bias corrects it, or config.json says so."""
    corrected = any(key.endswith("e_score_correction_bias") for key in source.entries)
    told = text_config(source.config).get("scoring_func") == "sigmoid"
    scoring: Any = "sigmoid" if corrected or told else "softmax"
    num_experts, hidden_size, _ = of
    at_most = min(top_k, num_experts)
    return _made(entry, TopKRouter, hidden_size, num_experts, at_most, scoring=scoring)


def _linears(source: Source, names: Mapping[str, str]) -> dict[tuple[int, int, str | None], Entry]:
    """Return (N, K, dtype of the bias) -> the first such weight that is no expert's."""
    found: dict[tuple[int, int, str | None], Entry] = {}
    for key, name in names.items():
        entry = source.entries[key]
        if len(entry.shape) == 2 and split_expert(name) is None:
            bias = source.entries.get(f"{key.removesuffix('.weight')}.bias")
            if bias is not None and bias.dtype not in _BIASES:
                raise CheckpointError(
                    f"{bias}: dtype of a bias must be one of {', '.join(_BIASES)}, got {bias.dtype}"
                )
            found.setdefault((*_matrix(entry), None if bias is None else bias.dtype), entry)
    return found


def _shared(source: Source, names: Mapping[str, str]) -> dict[tuple[int, int], Entry]:
    """Return (H, I) of shared experts -> the first such down projection."""
    found: dict[tuple[int, int], Entry] = {}
    for key, name in names.items():
        if name.endswith(".shared_experts.down_proj.weight"):
            found.setdefault(_matrix(source.entries[key]), source.entries[key])
    return found


def _experts(source: Source, names: Mapping[str, str]) -> dict[tuple[int, int, int], Entry]:
    """Return (E, H, I) of routed experts, one by one or fused -> one of their down projections."""
    numbers: dict[str, int] = {}
    downs: dict[str, Entry] = {}
    fused = []
    for key, name in names.items():
        entry, expert = source.entries[key], split_expert(name)
        if expert is not None:
            module, index = expert
            numbers[module] = max(numbers.get(module, 0), index + 1)
            if name.endswith(".down_proj.weight"):
                downs[module] = entry
        elif len(entry.shape) == 3 and name.endswith("down_proj"):
            fused.append(entry)
    found: dict[tuple[int, int, int], Entry] = {}
    for module, entry in downs.items():
        found.setdefault((numbers[module], *_matrix(entry)), entry)
    for entry in fused:
        found.setdefault((entry.shape[0], entry.shape[1], entry.shape[2]), entry)
    return found


def _matrix(entry: Entry) -> tuple[int, int]:
    if len(entry.shape) != 2:
        raise CheckpointError(f"{entry}: must have two dimensions, got {list(entry.shape)}")
    return entry.shape[0], entry.shape[1]
