"""Where the tensors of an expert layer lie: its weights, and what its kernels leave for the next.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.
"""

from typing import NamedTuple

import torch

from ..kernels.common.blocks import E4M3, num_blocks, round_up, round_up_to_tma
from ..kernels.common.tma_operands import fitting, lying_as
from ..kernels.gemm.operands import Operands
from ..routing.dispatch_launch import most_count_bytes
from .expert_configs import Sizes

_ALIGNMENT = 256
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
        matrices, rows = sizes.matrix
        pitch, h, i = scale_pitch(rows), sizes.hidden_size, sizes.intermediate_size
        token_bytes = round_up(matrices * rows * round_up(h, 16), _ALIGNMENT)
        token_scale_bytes = matrices * num_blocks(h) * pitch * 4
        result_bytes = matrices * rows * round_up(h, 8) * 2
        lengths = (
            max(token_bytes + token_scale_bytes, result_bytes),
            max(matrices * rows * round_up(i, 16), most_count_bytes(*sizes[:3])),
            matrices * num_blocks(i) * pitch * 4,
            (sizes.num_experts + 1) * 4,
            sizes.num_experts * 4,
            sizes.num_tokens * sizes.top_k * 4,
            2 * 4,
        )
        starts = [0]
        for length in lengths:
            starts.append(round_up(starts[-1] + length, _ALIGNMENT))
        tokens, *rest = starts
        return cls(tokens, tokens + token_bytes, tokens, *rest)


def scale_pitch(rows: int) -> int:
    """The distance from one k-block's scales to the next's, in elements."""
    return round_up_to_tma(rows, 4)


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
    matrices, rows = sizes.matrix
    h, i, pitch = sizes.hidden_size, sizes.intermediate_size, scale_pitch(rows)

    def matrix(columns: int, row_pitch: int, dtype: torch.dtype) -> torch.Tensor:
        shape, strides = (matrices, rows, columns), (rows * row_pitch, row_pitch, 1)
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    def scales(columns: int) -> torch.Tensor:
        shape, strides = (matrices, rows, columns), (columns * pitch, 1, pitch)
        return torch.empty_strided(shape, strides, dtype=torch.float32, device="meta")

    tokens = matrix(h, round_up(h, 16), E4M3), scales(num_blocks(h))
    activated = matrix(i, round_up(i, 16), E4M3), scales(num_blocks(i))
    results = matrix(h, round_up(h, 8), torch.bfloat16)
    return (
        Operands(*tokens, weights.gate, weights.gate_scale_inv, activated[0]),
        Operands(*activated, weights.down, weights.down_scale_inv, results),
    )
