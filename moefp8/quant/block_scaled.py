"""`BlockScaled`: E4M3 data with one FP32 scale per block; `data * scale_inv` is the value."""

from typing import NamedTuple

import torch

from ..kernels.common.blocks import BLOCK, E4M3, e4m3_to_float, num_blocks
from ..kernels.common.checks import check_same_device, check_tensor
from . import quantize as ops
from .numerics import matrices_of, tiles_128x128
from .weight_format import FORMATS, format_of, tile_scales


class BlockScaled(NamedTuple):
    """A block-scaled FP8 tensor; it unpacks to the pair that the GEMMs take.

    Attributes:
        data: e4m3 [..., N, K], row-major.
        scale_inv: fp32, one per block: [..., N, ceil(K/128)] for 1x128 blocks,
            [..., ceil(N/128), ceil(K/128)] for 128x128. `data * scale_inv` is the value.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor


def quantize_1x128(x: torch.Tensor, *, ue8m0: bool = False) -> BlockScaled:
    """Quantize activations, one scale per 128 elements of a row.

    `scale_inv = max(amax, 1e-4) / 448` and `data = x / scale_inv` (DeepSeek-V3,
    arXiv:2412.19437, section 3.3).

    Args:
        x: [..., K] bf16, fp16 or fp32, of any shape. NaN and Inf make their own block NaN.
        ue8m0: round each scale up to a power of two, before quantizing with it.

    Returns:
        data e4m3 [..., K], contiguous; scale_inv fp32 [..., ceil(K/128)] in the memory order of a
        TMA load: of the last two axes, M is contiguous and padded to a multiple of 4.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: `x` has no dimension.
    """
    return BlockScaled(*ops.quantize_1x128(x, ue8m0))


def quantize_128x128(w: torch.Tensor, *, ue8m0: bool = False) -> BlockScaled:
    """Quantize weights, one scale per 128x128 block; blocks at the edges are smaller.

    Args:
        w: [..., N, K] bf16, fp16 or fp32; leading axes (experts) are quantized one by one.
        ue8m0: round each scale up to a power of two, before quantizing with it.

    Returns:
        data e4m3 [..., N, K] and scale_inv fp32 [..., ceil(N/128), ceil(K/128)], contiguous.

    Raises:
        TypeError: `w` has another dtype.
        ValueError: `w` has fewer than two dimensions.
    """
    return BlockScaled(*ops.quantize_128x128(w, ue8m0))


def dequantize(q: BlockScaled, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`data * scale_inv` in FP32, rounded to `dtype`.

    Args:
        q: (data [..., N, K], scale_inv) with 1x128 blocks, or weights in any of `FORMATS`; the
            shape of the scales says which. A one-dimensional `data` [K] has 1x128 blocks.

    Raises:
        TypeError: `data` is not e4m3, or `scale_inv` not fp32.
        ValueError: the shape of `scale_inv` fits neither kind of block.
    """
    data, scale_inv = q
    check_tensor("dequantize", "data", data, (E4M3,))
    check_tensor("dequantize", "scale_inv", scale_inv, (torch.float32,))
    check_same_device("dequantize", data=data, scale_inv=scale_inv)
    if data.ndim < 1:
        raise ValueError("dequantize: data must be [..., K], got shape []")
    *rows, k = data.shape
    if list(scale_inv.shape) == [*rows, num_blocks(k)]:
        scale = scale_inv.repeat_interleave(BLOCK, dim=-1)[..., :k]
        return (e4m3_to_float(data) * scale).to(dtype)
    if data.ndim < 2 or format_of(data.shape, scale_inv.shape) is None:
        rules = " or ".join(f"[..., {x.rule('N', 'K')}]" for x in FORMATS)
        raise ValueError(
            f"dequantize: scale_inv must be [..., N, ceil(K/128)] or {rules} for data "
            f"{list(data.shape)}, got {list(scale_inv.shape)}"
        )
    scale_inv = tile_scales(data, scale_inv)
    has_gradient = torch.is_grad_enabled() and scale_inv.requires_grad
    if not data.is_cpu or torch.compiler.is_compiling() or has_gradient:
        return _scaled(data, scale_inv).to(dtype)
    values = torch.empty(data.shape, dtype=dtype, device=data.device)
    for codes, scales, weights in matrices_of(data, scale_inv, values):
        for tile, blocks in tiles_128x128(codes):  # temporaries of a tile stay in the cache
            weights[tile] = _scaled(codes[tile], scales[blocks])
    return values


def _scaled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [..., N, K]: codes times the scales of their 128x128 blocks."""
    rows = scales.repeat_interleave(BLOCK, dim=-2)[..., : codes.shape[-2], :]
    return e4m3_to_float(codes) * rows.repeat_interleave(BLOCK, dim=-1)[..., : codes.shape[-1]]
