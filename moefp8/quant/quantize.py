"""Quantize to E4M3 with one FP32 scale per 1x128 or 128x128 block.

`scale_inv = max(amax, 1e-4) / 448` multiplies to dequantize (DeepSeek-V3, arXiv:2412.19437,
section 3.3); `data = x / scale_inv`, rounded to the nearest even E4M3. With `ue8m0` the scale is
first rounded up to a power of two, so that no value overflows. NaN and Inf make their own block
NaN, and no other: a NaN makes its scale NaN, an Inf makes it Inf, which leaves the other elements
zeros that keep their signs. The code of a NaN is 0x7f.
"""

import math

import torch
from einops import rearrange, reduce

from ..kernels.common.blocks import (
    BLOCK,
    E4M3,
    E4M3_MAX,
    MIN_AMAX,
    empty_tma_aligned,
    num_blocks,
    round_up,
)
from ..kernels.common.checks import FLOATS, check_tensor
from ..kernels.common.registry import register
from .quantize_launch import BLOCK_ROWS, Cut, launch_quantize


def _check(op: str, name: str, x: torch.Tensor, min_ndim: int, layout: str) -> None:
    check_tensor(op, name, x, FLOATS)
    if x.ndim < min_ndim:
        raise ValueError(f"{op}: {name} must be {layout}, got shape {list(x.shape)}")


def _scale_from_amax(amax: torch.Tensor, ue8m0: bool) -> torch.Tensor:
    # By a tensor: on a GPU, PyTorch divides by a number by multiplying with its reciprocal.
    scale_inv = amax.clamp(min=MIN_AMAX) / amax.new_full((), E4M3_MAX)
    if not ue8m0:
        return scale_inv
    mantissa, exponent = torch.frexp(scale_inv)  # scale_inv = mantissa * 2**exponent, 0.5 <= m < 1
    rounded_up = torch.ldexp(torch.ones_like(scale_inv), exponent)
    return torch.where((mantissa == 0.5) | ~scale_inv.isfinite(), scale_inv, rounded_up)


def _to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    # Before torch 2.12 the cast does not saturate: 448.01 may become NaN. The sign of a NaN, which
    # the cast keeps, depends on the processor and on where in its vectors the element lies.
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).nan_to_num_(nan=math.nan).to(E4M3)


def _pad_to_blocks(x: torch.Tensor, rows: bool = False) -> torch.Tensor:
    """fp32, with zeros up to a multiple of 128 columns, and of 128 rows if `rows`."""
    shape = [*x.shape[:-1], round_up(x.shape[-1], BLOCK)]
    if rows:
        shape[-2] = round_up(shape[-2], BLOCK)
    if shape == list(x.shape):
        return x.float()
    padded = x.new_zeros(shape, dtype=torch.float32)
    padded[tuple(slice(size) for size in x.shape)] = x
    return padded


def _quantize_1x128(x: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale_inv = _allocate_1x128(x, ue8m0)
    blocks = rearrange(_pad_to_blocks(x), "... (k_blocks block) -> ... k_blocks block", block=BLOCK)
    scale_inv.copy_(_scale_from_amax(blocks.abs().amax(dim=-1), ue8m0))
    quantized = _to_e4m3(blocks / scale_inv[..., None])
    data.copy_(quantized.flatten(-2)[..., : x.shape[-1]])
    return data, scale_inv


def _allocate_1x128(x: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Check, then allocate data and scales. Also the fake body."""
    _check("quantize_1x128", "x", x, 1, "[..., K]")
    data = torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    *rows, k = x.shape
    scale_inv = empty_tma_aligned([*(rows or [1]), num_blocks(k)], x.device)
    return data, scale_inv if rows else scale_inv[0]


def _matrices(x: torch.Tensor) -> torch.Tensor:
    """x [..., N, K] as [B, N, K]; a view where x is contiguous."""
    return x[None] if x.ndim == 2 else x.flatten(0, -3)


def _quantize_128x128(w: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale_inv = _allocate_128x128(w, ue8m0)
    n, k = w.shape[-2:]
    # One matrix at a time: the FP32 copies of all experts at once would not fit.
    all_matrices = (_matrices(w), _matrices(data), _matrices(scale_inv))
    for matrix, matrix_data, matrix_scale_inv in zip(*all_matrices, strict=True):
        padded = _pad_to_blocks(matrix, rows=True)
        amax = reduce(padded.abs(), "(nb r) (kb c) -> nb kb", "max", r=BLOCK, c=BLOCK)
        matrix_scale_inv.copy_(_scale_from_amax(amax, ue8m0))
        blocks = rearrange(padded, "(nb r) (kb c) -> nb r kb c", r=BLOCK, c=BLOCK)
        quantized = _to_e4m3(blocks / matrix_scale_inv[:, None, :, None])
        matrix_data.copy_(rearrange(quantized, "nb r kb c -> (nb r) (kb c)")[:n, :k])
    return data, scale_inv


def _allocate_128x128(w: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Check, then allocate data and scales. Also the fake body."""
    _check("quantize_128x128", "w", w, 2, "[..., N, K]")
    *batch, n, k = w.shape
    data = torch.empty_like(w, dtype=E4M3, memory_format=torch.contiguous_format)
    scale_shape = [*batch, num_blocks(n), num_blocks(k)]
    return data, torch.empty(scale_shape, dtype=torch.float32, device=w.device)


def launch_quantize_1x128(
    x: torch.Tensor, ue8m0: bool, *, programmatic: bool = False, cut: Cut | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_1x128` on a Hopper GPU: one kernel on the current stream; nothing waits for it.

    programmatic: it may be launched before the stream's previous kernel ends, and then waits.
    cut: instead of that of `cut_1x128`.
    """
    data, scale_inv = _allocate_1x128(x, ue8m0)
    if data.numel():
        launch_quantize(x, data, scale_inv, ue8m0, programmatic=programmatic, cut=cut)
    return data, scale_inv


def launch_quantize_128x128(
    w: torch.Tensor, ue8m0: bool, *, programmatic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_128x128` on a Hopper GPU, all matrices by one kernel; see the launcher above."""
    data, scale_inv = _allocate_128x128(w, ue8m0)
    if data.numel():
        launch_quantize(w, data, scale_inv, ue8m0, programmatic=programmatic, cut=BLOCK_ROWS)
    return data, scale_inv


quantize_1x128 = register(
    "quantize_1x128(Tensor x, bool ue8m0) -> (Tensor, Tensor)",
    _quantize_1x128,
    _allocate_1x128,
    launch_quantize_1x128,
)
quantize_128x128 = register(
    "quantize_128x128(Tensor w, bool ue8m0) -> (Tensor, Tensor)",
    _quantize_128x128,
    _allocate_128x128,
    launch_quantize_128x128,
)
