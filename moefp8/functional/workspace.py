"""How large the memory of an expert layer is, in how many parts it is computed, its weights.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from ..kernels.common.blocks import BLOCK, ceil_div, num_blocks, round_up
from ..kernels.common.tma_operands import fitting, lying_as
from ..routing.dispatch_launch import most_count_bytes
from .expert_configs import Sizes, matrix_of

_ALIGNMENT = 256
MAX_WORKSPACE_BYTES = 4 << 30
Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # see `ExpertsInputs`


def forward_bytes(sizes: Sizes) -> int:
    """At least what the steps of a forward have in memory at a time."""
    matrices, rows = matrix_of(sizes)
    pitch, h, i = round_up(rows, 4), sizes.hidden_size, sizes.intermediate_size
    codes = round_up(matrices * rows * round_up(h, 16), _ALIGNMENT)
    token_bytes = codes + matrices * num_blocks(h) * pitch * 4
    return _sum(
        max(token_bytes, matrices * rows * round_up(h, 8) * 2),
        max(matrices * rows * round_up(i, 16), _count_bytes(sizes)),
        matrices * num_blocks(i) * pitch * 4,
        (sizes.num_experts + 1) * 4,
        sizes.num_experts * 4,
        sizes.num_tokens * sizes.top_k * 4,
        2 * 4,
    )


def backward_bytes(sizes: Sizes) -> int:
    """The same of a backward, which is contiguous."""
    num_choices = rows = sizes.num_tokens * sizes.top_k
    pitch, h, i = round_up(rows, 4), sizes.hidden_size, sizes.intermediate_size
    codes = round_up(rows * round_up(h, 16), _ALIGNMENT)
    return _sum(
        max(codes + num_blocks(h) * pitch * 4, rows * round_up(h, 8) * 2),
        max(rows * round_up(i, 8) * 2, _count_bytes(sizes)),
        rows * 2 * round_up(i, BLOCK),
        2 * num_blocks(i) * pitch * 4,
        (sizes.num_experts + 1) * 4,
        sizes.num_experts * 4,
        num_choices * 4,
        num_choices * 4,
        2 * 4,
    )


def _count_bytes(sizes: Sizes) -> int:
    return most_count_bytes(sizes.num_tokens, sizes.top_k, sizes.num_experts)


def _sum(*lengths: int) -> int:
    return sum(round_up(length, _ALIGNMENT) for length in lengths)


def num_parts_of(sizes: Sizes, *, has_backward: bool, trains: bool = False) -> int:
    """In how many parts tokens are computed, so that no workspace is too large.

    A backward has the parts of its forward, whose rows it needs. One token is never split.

    trains: whether weights have gradients by FP8, too. A part of what these need depends on no
        token: if that is more than half of the bound, the rest is bounded by the other half.
    """
    size, of_each = forward_bytes(sizes), 0
    if has_backward:
        size = max(size, backward_bytes(sizes))
    if trains:
        block = (3 * sizes.intermediate_size + sizes.hidden_size) * (BLOCK + 4)  # with its scales
        size += sizes.num_tokens * sizes.top_k // BLOCK * block
        of_each = sizes.num_experts * block  # that an expert's last block may leave empty
    room = max(MAX_WORKSPACE_BYTES - of_each, MAX_WORKSPACE_BYTES // 2)
    return min(sizes.num_tokens, ceil_div(size, room))


@lru_cache(4096)
def has_one_part(sizes: Sizes, *, has_backward: bool) -> bool:
    """Whether tokens are computed in one part, and there is something to compute."""
    return 0 not in sizes[:5] and num_parts_of(sizes, has_backward=has_backward) == 1


class Weights(NamedTuple):
    """The weights of all experts, gate apart from up: e4m3 matrices and their fp32 scales."""

    gate: torch.Tensor  # [E, I, H]
    gate_scale_inv: torch.Tensor
    up: torch.Tensor
    up_scale_inv: torch.Tensor
    down: torch.Tensor  # [E, H, I]
    down_scale_inv: torch.Tensor


def split_weights(projections: Projections) -> Weights:
    """Views of gate and up apart from each other."""
    gate_up, gate_up_scale_inv, down, down_scale_inv = projections
    i = down.shape[2]
    blocks = num_blocks(i)
    return Weights(
        gate=gate_up[:, :i],
        gate_scale_inv=gate_up_scale_inv[:, :blocks],
        up=gate_up[:, i:],
        up_scale_inv=gate_up_scale_inv[:, blocks:],
        down=down,
        down_scale_inv=down_scale_inv,
    )


def fitting_weights(weights: Weights) -> Weights:
    """The weights, each itself or a copy that TMA can address."""
    gate = fitting(weights.gate)
    return weights._replace(gate=gate, up=lying_as(gate, weights.up), down=fitting(weights.down))
