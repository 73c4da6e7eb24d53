"""Keys and layouts of PEFT's files. N out, K in, r rank, E experts.

PEFT names tensors by the modules that it wraps around a model's. One that wraps experts has the
adapter of one weight; where both weights have one, gate_up_proj's keys are under those of
down_proj, below `base_layer`. Experts stand side by side: A is [E r, K], expert by expert, and B is
[N, r E], where column i E + e is column i of expert e (`ParamWrapper` of PEFT, 0.19 and later).
"""

from collections.abc import Collection
from typing import NamedTuple

import torch

from .targets import STACKS, Target, join

PREFIX = "base_model.model"
KEY = r"base_model\.model\.((?:.*\.)?)lora_[AB]\.weight"


class Keys(NamedTuple):
    A: str
    B: str


def keys_of(target: Target, stacks: Collection[str]) -> Keys:
    """The keys of a weight's adapter; stacks: which weights of the same experts have one."""
    is_inner = target.parameter == STACKS[0] and len(stacks) == len(STACKS)
    path = join(target.path, "base_layer") if is_inner else target.path
    return Keys(*(join(join(PREFIX, path), f"lora_{x}.weight") for x in "AB"))


def shapes_of(target: Target, rank: int) -> tuple[list[int], list[int]]:
    """The shapes of A and B in a file, which holds the experts of all ranks."""
    *_, n, k = target.shape
    num_experts = 1
    if target.parameter != "weight":
        num_experts = target.module.num_global_experts or target.module.num_experts
    return [num_experts * rank, k], [n, rank * num_experts]


def to_file(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a `LoRA` as PEFT lays them."""
    if a.ndim == 2:
        return a, b
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def from_file(
    a: torch.Tensor, b: torch.Tensor, target: Target, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The way back: of the experts in a file, those that are here."""
    if target.parameter == "weight":
        return a, b
    module = target.module
    here = module.expert_offset, module.num_experts
    a, b = stacked(a, b, rank)
    return a.narrow(0, *here), b.narrow(0, *here)


def stacked(a: torch.Tensor, b: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, K] and B [E, N, r] of all experts in PEFT's layout, as views."""
    return a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)
