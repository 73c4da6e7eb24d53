"""Where the tensors of an expert layer lie: its weights, and what its kernels leave for the next.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from ..kernels.common.blocks import (
    BLOCK,
    E4M3,
    ceil_div,
    num_blocks,
    round_up,
    round_up_to_tma,
)
from ..kernels.common.tma_operands import fitting, lying_as
from ..kernels.gemm.operands import Operands
from ..kernels.jit import Source
from ..routing.dispatch_launch import most_count_bytes
from .expert_configs import Sizes, matrix_of

_ALIGNMENT = 256
MAX_WORKSPACE_BYTES = 4 << 30
Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # see `ExpertsInputs`


class Workspace(NamedTuple):
    """Where in the workspace everything lies, in bytes. The tokens' rows give way to results."""

    tokens: int
    token_scales: int
    results: int
    activated: int
    activated_scales: int
    offsets: int
    counts: int
    token_to_row: int
    tile_counters: int
    size: int

    @classmethod
    def of(cls, sizes: Sizes) -> "Workspace":
        matrices, rows = matrix_of(sizes)
        pitch, h, i = scale_pitch(rows), sizes.hidden_size, sizes.intermediate_size
        token_bytes = round_up(matrices * rows * round_up(h, 16), _ALIGNMENT)
        token_scale_bytes = matrices * num_blocks(h) * pitch * 4
        result_bytes = matrices * rows * round_up(h, 8) * 2
        lengths = (
            max(token_bytes + token_scale_bytes, result_bytes),
            max(matrices * rows * round_up(i, 16), _most_count_bytes(sizes)),
            matrices * num_blocks(i) * pitch * 4,
            (sizes.num_experts + 1) * 4,
            sizes.num_experts * 4,
            sizes.num_tokens * sizes.top_k * 4,
            2 * 4,
        )
        return cls(0, token_bytes, *_places(lengths))


class Memory:
    """Places in a workspace that are taken one behind the other, for the sources of launches.

    size: how large the workspace has to be for those that were taken, in bytes.
    """

    def __init__(self, source: Source) -> None:
        self._source, self.size = source, 0

    def take(self, num_bytes: int) -> Source:
        """The next place for so many bytes."""
        place = self._source._replace(plus=self.size)
        self.size = round_up(self.size + num_bytes, _ALIGNMENT)
        return place


def _most_count_bytes(sizes: Sizes) -> int:
    return most_count_bytes(sizes.num_tokens, sizes.top_k, sizes.num_experts)


def _places(lengths: Iterable[int]) -> list[int]:
    """Where each part begins, one behind the other, and where the last one ends."""
    ends = accumulate(lengths, lambda end, length: round_up(end + length, _ALIGNMENT), initial=0)
    return list(ends)


def scale_pitch(rows: int) -> int:
    """The distance from one k-block's scales to the next's, in elements."""
    return round_up_to_tma(rows, 4)


class BackwardWorkspace(NamedTuple):
    """The same of a backward, which is contiguous. The gradients' rows give way to results."""

    tokens: int
    token_scales: int
    results: int
    of_activated: int
    gate_up: int
    gate_up_scales: int
    offsets: int
    counts: int
    token_to_row: int
    is_first: int
    tile_counters: int
    size: int

    @classmethod
    def of(cls, sizes: Sizes) -> "BackwardWorkspace":
        num_choices = rows = sizes.num_tokens * sizes.top_k
        pitch, h, i = scale_pitch(rows), sizes.hidden_size, sizes.intermediate_size
        token_bytes = round_up(rows * round_up(h, 16), _ALIGNMENT)
        token_scale_bytes = num_blocks(h) * pitch * 4
        lengths = (
            max(token_bytes + token_scale_bytes, rows * round_up(h, 8) * 2),
            max(rows * round_up(i, 8) * 2, _most_count_bytes(sizes)),
            rows * 2 * round_up(i, BLOCK),
            2 * num_blocks(i) * pitch * 4,
            (sizes.num_experts + 1) * 4,
            sizes.num_experts * 4,
            num_choices * 4,
            num_choices * 4,
            2 * 4,
        )
        return cls(0, token_bytes, *_places(lengths))


def num_parts_of(sizes: Sizes, *, has_backward: bool, trains: bool = False) -> int:
    """In how many parts tokens are computed, so that no workspace is too large.

    A backward has the parts of its forward, whose rows it needs. One token is never split.

    trains: whether weights have gradients by FP8, too. A part of what these need depends on no
        token: if that is more than half of the bound, the rest is bounded by the other half.
    """
    size, of_each = Workspace.of(sizes).size, 0
    if has_backward:
        size = max(size, BackwardWorkspace.of(sizes).size)
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


def operands_of(sizes: Sizes, weights: Weights) -> tuple[Operands, Operands]:
    """The operands of the GEMM of gate and up, with gate as b, and of that of down.

    Tokens and results lie as in the workspace, but have no memory.
    """
    of_matrix, h, i = matrix_of(sizes), sizes.hidden_size, sizes.intermediate_size
    tokens = _codes(of_matrix, h)
    activated = _codes(of_matrix, i)
    results = _matrix(of_matrix, h, round_up(h, 8), torch.bfloat16)
    return (
        Operands(*tokens, weights.gate, weights.gate_scale_inv, activated[0]),
        Operands(*activated, weights.down, weights.down_scale_inv, results),
    )


def backward_operands_of(
    sizes: Sizes, transposed: tuple[torch.Tensor, ...]
) -> tuple[Operands, Operands]:
    """The same of the GEMMs of a backward: with W_down^T, then with that of gate and up.

    transposed: W_down^T e4m3 [E, I, H] and its scales, then W_gate_up^T [E, H, 2 I], where both
        halves begin at multiples of 128, and its scales.
    """
    rows = 1, sizes.num_tokens * sizes.top_k
    down, down_scales, gate_up, gate_up_scales = transposed
    h, i = sizes.hidden_size, sizes.intermediate_size
    of_activated = _matrix(rows, i, round_up(i, 8), torch.bfloat16)
    results = _matrix(rows, h, round_up(h, 8), torch.bfloat16)
    return (
        Operands(*_codes(rows, h), down, down_scales, of_activated),
        Operands(*_codes(rows, 2 * round_up(i, BLOCK)), gate_up, gate_up_scales, results),
    )


def _codes(of_matrix: tuple[int, int], columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in rows of whole 16 bytes, and their scales."""
    matrices, rows = of_matrix
    blocks, pitch = num_blocks(columns), scale_pitch(rows)
    shape, strides = (matrices, rows, blocks), (blocks * pitch, 1, pitch)
    scales = torch.empty_strided(shape, strides, dtype=torch.float32, device="meta")
    return _matrix(of_matrix, columns, round_up(columns, 16), E4M3), scales


def _matrix(
    of_matrix: tuple[int, int], columns: int, row_pitch: int, dtype: torch.dtype
) -> torch.Tensor:
    matrices, rows = of_matrix
    shape, strides = (matrices, rows, columns), (rows * row_pitch, row_pitch, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
