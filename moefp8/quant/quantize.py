"""Quantize to E4M3 with one FP32 scale per 1x128 or 128x128 block: the ops, a body per device.

The numerics are those of `numerics.py`.
"""

import torch

from ..kernels.common.blocks import E4M3, MIN_AMAX, MIN_GRADIENT_AMAX, empty_tma_aligned, num_blocks
from ..kernels.common.checks import FLOATS, check_tensor
from ..kernels.common.registry import register
from . import numerics
from .quantize_launch import BLOCK_ROWS, Cut, Quantized, launch_quantize


def _check(op: str, name: str, x: torch.Tensor, min_ndim: int, layout: str) -> None:
    check_tensor(op, name, x, FLOATS)
    if x.ndim < min_ndim:
        raise ValueError(f"{op}: {name} must be {layout}, got shape {list(x.shape)}")


def _allocate_1x128(x: torch.Tensor, ue8m0: bool, min_amax: float = MIN_AMAX) -> Quantized:
    """Check, then allocate data and scales. Also the fake body."""
    _check("quantize_1x128", "x", x, 1, "[..., K]")
    data = torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    *rows, k = x.shape
    scale_inv = empty_tma_aligned([*(rows or [1]), num_blocks(k)], x.device)
    return data, scale_inv if rows else scale_inv[0]


def _quantize_1x128(x: torch.Tensor, ue8m0: bool, min_amax: float = MIN_AMAX) -> Quantized:
    _check("quantize_1x128", "x", x, 1, "[..., K]")
    return numerics.quantize_1x128(x, ue8m0, min_amax)


def _allocate_128x128(w: torch.Tensor, ue8m0: bool) -> Quantized:
    """Check, then allocate data and scales. Also the fake body."""
    _check("quantize_128x128", "w", w, 2, "[..., N, K]")
    *batch, n, k = w.shape
    data = torch.empty_like(w, dtype=E4M3, memory_format=torch.contiguous_format)
    scale_shape = [*batch, num_blocks(n), num_blocks(k)]
    return data, torch.empty(scale_shape, dtype=torch.float32, device=w.device)


def _quantize_128x128(w: torch.Tensor, ue8m0: bool) -> Quantized:
    data, scale_inv = _allocate_128x128(w, ue8m0)
    for matrix, codes, scales in numerics.matrices_of(w, data, scale_inv):
        numerics.quantize_128x128_into(matrix, codes, scales, ue8m0)
    return data, scale_inv


def launch_quantize_1x128(
    x: torch.Tensor, ue8m0: bool, min_amax: float = MIN_AMAX, cut: Cut | None = None
) -> Quantized:
    """`quantize_1x128` on a Hopper GPU: one kernel on the current stream; nothing waits for it.

    cut: taken instead of what `cut_1x128` chooses.
    """
    return launch_quantize(x, *_allocate_1x128(x, ue8m0), ue8m0, cut, min_amax)


def launch_quantize_128x128(w: torch.Tensor, ue8m0: bool) -> Quantized:
    """`quantize_128x128` on a Hopper GPU, all matrices by one kernel; see the launcher above."""
    return launch_quantize(w, *_allocate_128x128(w, ue8m0), ue8m0, BLOCK_ROWS)


quantize_1x128 = register(
    "quantize_1x128(Tensor x, bool ue8m0, float min_amax=1e-4) -> (Tensor, Tensor)",
    _quantize_1x128,
    _allocate_1x128,
    launch_quantize_1x128,
)
quantize_gradient_1x128 = register(
    "quantize_gradient_1x128(Tensor grad) -> (Tensor, Tensor)",
    lambda grad: _quantize_1x128(grad, False, MIN_GRADIENT_AMAX),
    lambda grad: _allocate_1x128(grad, False),
    lambda grad: launch_quantize_1x128(grad, False, MIN_GRADIENT_AMAX),
)
"""`quantize_1x128` with `MIN_GRADIENT_AMAX`, for gradients that are traced: with dynamic shapes, a
float that Dynamo of torch 2.8 finds there takes the place of another argument."""

quantize_128x128 = register(
    "quantize_128x128(Tensor w, bool ue8m0) -> (Tensor, Tensor)",
    _quantize_128x128,
    _allocate_128x128,
    launch_quantize_128x128,
)
