"""Describe `swiglu_columns.cu`.

T tokens, k choices each, E experts, R rows, I intermediate, B blocks of column codes.
"""

from pathlib import Path
from typing import Any

import torch

from ...kernels.common.blocks import (
    BLOCK,
    MIN_GRADIENT_AMAX,
    ceil_div,
    num_blocks,
)
from ...kernels.common.checks import INPUTS
from ...kernels.common.divisor import divisor_of
from ...kernels.jit import Kernel
from ...kernels.program import Codes, Place, Record, Tensor
from ...quant.columns import num_column_blocks

_SOURCE = Path(__file__).with_name("swiglu_columns.cu")
_THREADS = 256
_LOADS_AT_ONCE = 8  # of partial sums
_MAX_TILES = 2**31 - 1  # of a grid, and numbers that `Divisor` is right for


def _kernel(name: str) -> Kernel:
    return Kernel(_SOURCE, f"swiglu_columns_{name}")


def weights_kernel_of(weights_dtype: torch.dtype) -> Kernel:
    return _kernel(f"weights_kernel<{INPUTS[weights_dtype]}>")


def kernel_of(*, is_fp8: bool, blocks: bool = False) -> Kernel:
    """blocks: 128 features of what is activated share a scale of columns."""
    return _kernel(f"kernel<{str(is_fp8).lower()}, {str(blocks).lower()}>")


def sums_kernel_of() -> Kernel:
    return _kernel(f"sums_kernel<{_LOADS_AT_ONCE}>")


def shared_bytes_of(*, is_fp8: bool) -> int:
    """The size of `Memory` in swiglu_columns_tile.cuh."""
    units, unit_rows, results, warps = 8, 16, 3, _THREADS // 32
    codes = sum(units * (unit_rows * BLOCK * n + 16) for n in (2, *[1 if is_fp8 else 2] * 2))
    amax, dividers, weights = warps * results * BLOCK * 4, results * BLOCK * 8, BLOCK * 4
    return codes + amax + dividers + weights + (2 * BLOCK * 4 if is_fp8 else 16)


def describe_swiglu_columns(
    r: Record,
    grad: Tensor,
    saved: Tensor,
    saved_scales: Tensor | None,
    weights: Tensor,
    expert_offsets: Place,
    token_to_row: Place,
    num_experts: int,
    limit: float,
    *,
    rows: Codes,
    gate_up_columns: Codes,
    activated_columns: Codes,
    grad_weights: Place,
    is_first: Place,
    weight_of_row: Place,
    partial_sums: Place,
    row_to_token: Place | None = None,
    blocks: bool = False,
) -> None:
    """Three steps: weights of rows, gradients, gradients of weights; one if there are no choices.

    Each waits for the step before it.

    Args:
        grad: bf16 [..., R, I] in rows of whole 16 bytes.
        saved: bf16 [R, 2, I] as `empty_gate_up` says, or e4m3 [2 R, I], contiguous, at a multiple
            of 8. There is at least one element.
        saved_scales: fp32 [2 R, ceil(I/128)], rows innermost; None for bf16.
        weights: [T, k].
        expert_offsets: int32 [E + 1]. token_to_row: int32 [T, k], contiguous.
        limit: that of `swiglu`; infinite if there is none.
        rows: e4m3 [..., R, 2 * (I rounded up to 128)], contiguous, where what follows the I of each
            half becomes zeros; fp32 scales, rows innermost.
        gate_up_columns, activated_columns: e4m3 [B, 2 I, 128] and [B, I, 128]; fp32 [B, 2 I] and
            [B, I], or with `blocks` [B, ceil(I/128)], as `empty_columns` says.
        grad_weights, is_first: fp32 [T, k].
        weight_of_row: fp32 [R], zeros in an expert's rows that no choice has, and anything
            elsewhere. partial_sums: fp32 [ceil(I/128), R]. Both are memory for what the kernels
            tell each other.
        row_to_token: int32 [R], which the first step writes for rows that a choice has; None: it
            does not.
        blocks: 128 features of what is activated share a scale.

    Raises:
        ValueError: there are more tiles than a grid takes.
    """
    is_fp8, size = saved_scales is not None, saved.shape[-1]
    num_rows = saved.shape[0] // (2 if is_fp8 else 1)
    (num_tokens, top_k), tiles_of_row = weights.shape, num_blocks(size)
    num_choices = num_tokens * top_k
    num_tiles = num_column_blocks(num_rows, num_experts) * tiles_of_row
    if max(num_tiles, num_choices + _THREADS) > _MAX_TILES:
        raise ValueError(
            f"swiglu_columns_backward: one call takes at most {_MAX_TILES} tiles of 128x128, and "
            f"choices, got {num_tiles} and {num_choices}; split the tokens"
        )
    arguments: dict[str, Any] = {
        "grad": grad.place,
        "grad_row_bytes": grad.bytes_of_stride(-2),
        "saved": saved.place,
        "saved_row_bytes": saved.bytes_of_stride(-2),
        "expert_offsets": expert_offsets,
        "token_to_row": token_to_row,
        "weights": weights.place,
        "weight_token_bytes": weights.bytes_of_stride(0),
        "weight_choice_bytes": weights.bytes_of_stride(1),
        "rows": rows.data.place,
        "row_pitch": 2 * tiles_of_row * BLOCK,
        "row_scales": rows.scale_inv.place,
        "scale_pitch": rows.scale_inv.strides[-1],
        "gate_up_columns": gate_up_columns.data.place,
        "gate_up_scales": gate_up_columns.scale_inv.place,
        "gate_up_scale_pitch": gate_up_columns.scale_inv.strides[0],
        "activated_columns": activated_columns.data.place,
        "activated_scales": activated_columns.scale_inv.place,
        "activated_scale_pitch": activated_columns.scale_inv.strides[0],
        "weight_of_row": weight_of_row,
        "row_to_token": row_to_token,
        "partial_sums": partial_sums,
        "of_weights": grad_weights,
        "is_first": is_first,
        "num_choices": num_choices,
        "num_rows": num_rows,
        "num_experts": num_experts,
        "size": size,
        "top_k": divisor_of(max(top_k, 1)),
        "num_tiles": divisor_of(tiles_of_row),
        "limit": limit,
        "min_amax": MIN_GRADIENT_AMAX,
    }
    if saved_scales is not None:
        arguments["saved_scales"] = saved_scales.place
        arguments["saved_scale_pitch"] = saved_scales.strides[-1]

    def step(kernel: Kernel, grid: int, shared_bytes: int = 0) -> None:
        r.step(kernel, grid, _THREADS, arguments, programmatic=True, shared_bytes=shared_bytes)

    if num_choices > 0:
        step(weights_kernel_of(weights.dtype), ceil_div(num_choices, _THREADS))
    step(kernel_of(is_fp8=is_fp8, blocks=blocks), num_tiles, shared_bytes_of(is_fp8=is_fp8))
    if num_choices > 0:
        step(sums_kernel_of(), ceil_div(num_choices, _THREADS))
