"""The FP8 layers of a checkpoint, without weights: modules of the same sizes, told by headers."""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..layers import FP8Linear, GroupedExperts, TopKRouter
from ..layers.moe import SharedExperts
from ..layers.router import TOP_K_NAMES
from .config import text_config
from .errors import CheckpointError
from .fp8 import scaled_weights
from .header import TORCH_DTYPES
from .names import canonical, split_expert
from .source import Source, open_source


class Layers(nn.ModuleList):
    """One module of each kind and size, on the meta device."""

    def __init__(self, modules: list[nn.Module], top_k: int | None) -> None:
        super().__init__(modules)
        self.top_k = top_k  # experts of a token; None: config.json does not say


def fp8_layers(path: str | os.PathLike[str], top_k: int | None = None) -> Layers:
    """Read headers and config.json alone.

    path: as in load_checkpoint. top_k: experts of a token; None: as config.json says.
    Routers are there if that is known. Raises CheckpointError.
    """
    source = open_source(path)
    names = {key: canonical(name) for key, name in scaled_weights(source).items()}
    if not names:
        raise CheckpointError(f"{path}: no weight has scales, so there is nothing in FP8")
    top_k = top_k or top_k_of(source.config)
    found = dict.fromkeys(_linears(source, names))
    modules: list[nn.Module] = []
    for n, k, bias in found:
        dtype = {} if bias is None else {"dtype": TORCH_DTYPES[bias]}
        modules.append(FP8Linear(k, n, bias is not None, device="meta", **dtype))
    for h, i in dict.fromkeys(_shared(source, names)):
        modules.append(SharedExperts(h, i, device="meta"))
    for sizes in dict.fromkeys(_experts(source, names)):
        modules.append(GroupedExperts(*sizes, device="meta"))
        if top_k is not None:
            modules.append(_router(source, sizes, top_k))
    return Layers(modules, top_k)


def _router(source: Source, sizes: tuple[int, int, int], top_k: int) -> TopKRouter:
    """It scores by the sigmoid where a bias corrects its choice, or where config.json says so."""
    corrected = any(key.endswith("e_score_correction_bias") for key in source.entries)
    told = text_config(source.config).get("scoring_func") == "sigmoid"
    scoring: Any = "sigmoid" if corrected or told else "softmax"
    num_experts, hidden_size, _ = sizes
    chosen = min(top_k, num_experts)
    return TopKRouter(hidden_size, num_experts, chosen, scoring=scoring, device="meta")


def _linears(source: Source, names: Mapping[str, str]) -> list[tuple[int, int, str | None]]:
    """(N, K, dtype of the bias) of weights that are no expert's."""
    found = []
    for key, name in names.items():
        shape = source.entries[key].shape
        if len(shape) == 2 and split_expert(name) is None:
            bias = source.entries.get(f"{key.removesuffix('.weight')}.bias")
            found.append((*shape, None if bias is None else bias.dtype))
    return found


def _shared(source: Source, names: Mapping[str, str]) -> list[tuple[int, int]]:
    """(H, I) of experts that every token takes."""
    return [
        (source.entries[key].shape[0], source.entries[key].shape[1])
        for key, name in names.items()
        if name.endswith(".shared_experts.down_proj.weight")
    ]


def _experts(source: Source, names: Mapping[str, str]) -> list[tuple[int, int, int]]:
    """(E, H, I) of routed experts, stored one by one or fused."""
    numbers: dict[str, int] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    fused = []
    for key, name in names.items():
        shape, expert = source.entries[key].shape, split_expert(name)
        if expert is not None:
            module, index = expert
            numbers[module] = max(numbers.get(module, 0), index + 1)
            if name.endswith(".down_proj.weight"):
                sizes[module] = shape
        elif len(shape) == 3 and name.endswith("down_proj"):
            fused.append((shape[0], shape[1], shape[2]))
    return [*((numbers[module], h, i) for module, (h, i) in sizes.items()), *fused]


def top_k_of(config: Mapping[str, Any]) -> int | None:
    values = (text_config(config).get(key) for key in TOP_K_NAMES)
    return next((value for value in values if type(value) is int and value >= 1), None)
