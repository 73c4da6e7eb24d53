"""Launch `swiglu_columns.cu` on a Hopper GPU.

T tokens, k choices each, E experts, R rows, I intermediate, B blocks of column codes.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ...kernels.common.blocks import (
    BLOCK,
    E4M3,
    MIN_GRADIENT_AMAX,
    ceil_div,
    num_blocks,
    round_up_to_tma,
)
from ...kernels.common.checks import INPUTS
from ...kernels.common.divisor import Divisor
from ...kernels.jit import Kernel, Launch, Source, current_driver, pointers, struct_of
from ...quant.columns import num_column_blocks

_SOURCE = Path(__file__).with_name("swiglu_columns.cu")
_Arguments = struct_of(_SOURCE)
_THREADS = 256
_LOADS_AT_ONCE = 8  # of partial sums
_MAX_TILES = 2**31 - 1  # of a grid, and numbers that `Divisor` is right for


class SwigluColumnsSources(NamedTuple):
    """Which addresses of a launch are those of `prepare_swiglu_columns`.

    saved_scales: only if `saved` is FP8. row_to_token: int32 [R], which the first kernel writes for
        rows that a choice has; None: it does not.
    """

    grad: Source
    saved: Source
    saved_scales: Source | None
    expert_offsets: Source
    token_to_row: Source
    weights: Source
    rows: Source
    row_scales: Source
    gate_up_columns: Source
    gate_up_scales: Source
    activated_columns: Source
    activated_scales: Source
    of_weights: Source
    is_first: Source
    weight_of_row: Source
    partial_sums: Source
    row_to_token: Source | None = None


def _kernel(name: str) -> Kernel:
    return Kernel(_SOURCE, f"swiglu_columns_{name}")


def weights_kernel_of(weights_dtype: torch.dtype) -> Kernel:
    return _kernel(f"weights_kernel<{INPUTS[weights_dtype]}>")


def kernel_of(*, is_fp8: bool, blocks: bool = False) -> Kernel:
    """blocks: 128 features of what is activated share a scale of columns."""
    return _kernel(f"kernel<{str(is_fp8).lower()}, {str(blocks).lower()}>")


def sums_kernel_of() -> Kernel:
    return _kernel(f"sums_kernel<{_LOADS_AT_ONCE}>")


def needed_kernels(
    weights_dtypes: Iterable[torch.dtype],
    saved_dtypes: Iterable[torch.dtype],
    *,
    blocks: bool = False,
) -> list[Kernel]:
    """The kernels for choices' weights, and for gate and up, of these dtypes.

    blocks: as in `kernel_of`.
    """
    return [
        *map(weights_kernel_of, weights_dtypes),
        *(kernel_of(is_fp8=dtype == E4M3, blocks=blocks) for dtype in saved_dtypes),
        sums_kernel_of(),
    ]


def shared_bytes_of(*, is_fp8: bool) -> int:
    """The size of `Memory` in swiglu_columns_tile.cuh."""
    units, unit_rows, results, warps = 8, 16, 3, _THREADS // 32
    codes = sum(units * (unit_rows * BLOCK * n + 16) for n in (2, *[1 if is_fp8 else 2] * 2))
    amax, dividers, weights = warps * results * BLOCK * 4, results * BLOCK * 8, BLOCK * 4
    return codes + amax + dividers + weights + (2 * BLOCK * 4 if is_fp8 else 16)


def prepare_swiglu_columns(
    saved: torch.Tensor,
    saved_scales: torch.Tensor | None,
    weights: torch.Tensor,
    num_experts: int,
    limit: float,
    *,
    grad_row_pitch: int,
    scale_pitch: int,
    sources: SwigluColumnsSources,
    blocks: bool = False,
) -> list[Launch]:
    """The launches, in their order.

    What `sources` name, besides `saved`, its scales and `weights`:

        grad: bf16 [R, I] in rows of `grad_row_pitch` elements, a multiple of 8.
        expert_offsets: int32 [E + 1]. token_to_row: int32 [T, k], contiguous.
        rows: e4m3 [R, 2, I rounded up to 128]; what lies behind I becomes zeros.
        row_scales: fp32 [2 ceil(I/128), scale_pitch], with R columns.
        gate_up_columns, activated_columns: e4m3 [B, 2 I, 128] and [B, I, 128].
        gate_up_scales, activated_scales: fp32 [B, 2 I] and [B, I], or [B, ceil(I/128)] with
            `blocks`, in rows as `empty_columns` says.
        of_weights, is_first: fp32 [T, k].
        weight_of_row: fp32 [R], zeros in an expert's rows that no choice has, and anything
            elsewhere. partial_sums: fp32 [ceil(I/128), R]. Both are memory for what the kernels
            tell each other.

    Args:
        saved: bf16 [R, 2, I] as `empty_gate_up` says, or e4m3 [2 R, I], contiguous, at a multiple
            of 8. There is at least one element.
        saved_scales: fp32 [2 R, ceil(I/128)], rows innermost; None for bf16.
        weights: [T, k].
        limit: that of `swiglu`; infinite if there is none.
        blocks: a row of activated_scales has one scale for 128 features, not one for each.

    They may be launched before the stream's previous kernel ends, and wait for it. Raises
    ValueError for more tiles than a grid takes.
    """
    driver, device_index = current_driver(), saved.get_device()
    is_fp8, size = saved_scales is not None, saved.shape[-1]
    num_rows = saved.shape[0] // 2 if is_fp8 else saved.shape[0]
    (num_tokens, top_k), tiles_of_row = weights.shape, num_blocks(size)
    num_choices = num_tokens * top_k
    num_tiles = num_column_blocks(num_rows, num_experts) * tiles_of_row
    if max(num_tiles, num_choices + _THREADS) > _MAX_TILES:
        raise ValueError(
            f"swiglu_columns_backward: one call takes at most {_MAX_TILES} tiles of 128x128, and "
            f"choices, got {num_tiles} and {num_choices}; split the tokens"
        )
    token_bytes, choice_bytes = (x * weights.element_size() for x in weights.stride())
    arguments = _Arguments(
        grad_row_bytes=grad_row_pitch * 2,
        saved_row_bytes=saved.stride(-2) * saved.element_size(),
        saved_scale_pitch=0 if saved_scales is None else saved_scales.stride(1),
        weight_token_bytes=token_bytes,
        weight_choice_bytes=choice_bytes,
        row_pitch=2 * tiles_of_row * BLOCK,
        scale_pitch=scale_pitch,
        gate_up_scale_pitch=round_up_to_tma(2 * size, torch.float32.itemsize),
        activated_scale_pitch=round_up_to_tma(
            tiles_of_row if blocks else size, torch.float32.itemsize
        ),
        num_choices=num_choices,
        num_rows=num_rows,
        num_experts=num_experts,
        size=size,
        top_k=Divisor.of(max(top_k, 1)),
        num_tiles=Divisor.of(tiles_of_row),
        limit=limit,
        min_amax=MIN_GRADIENT_AMAX,
    )

    def launch(kernel: Kernel, grid: int, shared_bytes: int = 0) -> Launch:
        return Launch(
            driver.load(kernel, device_index),
            grid,
            _THREADS,
            (arguments,),
            pointers(_Arguments, **sources._asdict()),
            shared_bytes=shared_bytes,
            programmatic=True,
        )

    kernel = kernel_of(is_fp8=is_fp8, blocks=blocks)
    tiles = launch(kernel, num_tiles, shared_bytes_of(is_fp8=is_fp8))
    if num_choices == 0:
        return [tiles]
    of_choices = ceil_div(num_choices, _THREADS)
    return [
        launch(weights_kernel_of(weights.dtype), of_choices),
        tiles,
        launch(sums_kernel_of(), of_choices),
    ]
