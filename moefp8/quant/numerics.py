"""Quantization to E4M3 with one FP32 scale per block by PyTorch, on any device.

`scale_inv = max(amax, min_amax) / 448` multiplies to dequantize (DeepSeek-V3, arXiv:2412.19437,
section 3.3); `data = x / scale_inv` in E4M3, rounded to nearest even. With `ue8m0` the scale is
first rounded up to a power of two, so that no value overflows. NaN and Inf make their own block
NaN, and no other: a NaN makes its scale NaN, an Inf makes it Inf, which leaves the other elements
zeros that keep their signs. The code of a NaN is 0x7f.

`kernels/device/fp8.cuh` does the same in kernels.
"""

import math
from collections.abc import Iterator

import torch
from einops import rearrange, reduce

from ..kernels.common.blocks import (
    BLOCK,
    E4M3,
    E4M3_MAX,
    MIN_AMAX,
    empty_tma_aligned,
    num_blocks,
    zero_padded,
)


def quantize_1x128(
    x: torch.Tensor, ue8m0: bool = False, min_amax: float = MIN_AMAX
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> e4m3 [..., K], and fp32 [..., ceil(K/128)] as `empty_tma_aligned` makes it."""
    *rows, k = x.shape
    padded = zero_padded(x.float(), len(rows))
    blocks = rearrange(padded, "... (k_blocks block) -> ... k_blocks block", block=BLOCK)
    scale_inv = empty_tma_aligned([*(rows or [1]), num_blocks(k)], x.device)
    scale_inv = scale_inv if rows else scale_inv[0]
    scale_inv.copy_(_scale_from_amax(blocks.abs().amax(dim=-1), ue8m0, min_amax))
    data = torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    return data.copy_(_to_e4m3(blocks / scale_inv[..., None]).flatten(-2)[..., :k]), scale_inv


def quantize_128x128(
    w: torch.Tensor, ue8m0: bool = False, min_amax: float = MIN_AMAX
) -> tuple[torch.Tensor, torch.Tensor]:
    """w [N, K] -> e4m3 [N, K], and fp32 [ceil(N/128), ceil(K/128)]."""
    data = torch.empty(w.shape, dtype=E4M3, device=w.device)
    scale_shape = [num_blocks(size) for size in w.shape]
    scale_inv = torch.empty(scale_shape, dtype=torch.float32, device=w.device)
    quantize_128x128_into(w, data, scale_inv, ue8m0, min_amax)
    return data, scale_inv


def quantize_128x128_into(
    w: torch.Tensor,
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    ue8m0: bool = False,
    min_amax: float = MIN_AMAX,
) -> None:
    """Fill `data` and `scale_inv` with what `quantize_128x128` returns, one tile at a time."""
    for tile, tile_blocks in tiles_128x128(w):
        blocks = blocks_128x128(w[tile].float())
        amax = reduce(blocks.abs(), "nb r kb c -> nb kb", "max")
        scale = scale_inv[tile_blocks] = _scale_from_amax(amax, ue8m0, min_amax)
        quantized = _to_e4m3(blocks / scale[:, None, :, None])
        n, k = data[tile].shape
        data[tile] = rearrange(quantized, "nb r kb c -> (nb r) (kb c)")[:n, :k]


def matrices_of(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the matrices [N, K] at the same place of tensors [..., N, K], as views."""
    return zip(*(x[None] if x.ndim == 2 else x.flatten(0, -3) for x in tensors), strict=True)


Slices = tuple[slice, slice]


def tiles_128x128(w: torch.Tensor) -> Iterator[tuple[Slices, Slices]]:
    """Cut w [N, K] along blocks into tiles whose FP32 copies are small.

    Yields each tile's slices of elements and of blocks. On a CPU, copies of 2 MiB stay in the
    cache: quantizing [14336, 4096] in BF16 takes 70 ms, without tiles 387 ms (Xeon, one thread;
    copies of 1 MiB: 87, of 4 MiB: 74). On a GPU each tile takes some ten launches.
    """
    num_rows, num_columns = map(num_blocks, w.shape)
    most = 32 if w.device.type == "cpu" else 1024
    columns = max(min(num_columns, most), 1)
    rows = most // columns
    for row in range(0, num_rows, rows):
        for column in range(0, num_columns, columns):
            blocks = slice(row, row + rows), slice(column, column + columns)
            yield (_elements(blocks[0]), _elements(blocks[1])), blocks


def _elements(blocks: slice) -> slice:
    return slice(blocks.start * BLOCK, blocks.stop * BLOCK)


def blocks_128x128(x: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [row blocks, 128, column blocks, 128], with zeros at the edges."""
    x = zero_padded(zero_padded(x, 1), 0)
    return rearrange(x, "(nb r) (kb c) -> nb r kb c", r=BLOCK, c=BLOCK)


def _scale_from_amax(amax: torch.Tensor, ue8m0: bool, min_amax: float = MIN_AMAX) -> torch.Tensor:
    # The divisor is a tensor because on a GPU PyTorch divides by numbers through reciprocals.
    scale_inv = amax.clamp(min=min_amax) / amax.new_full((), E4M3_MAX)
    if not ue8m0:
        return scale_inv
    mantissa, exponent = torch.frexp(scale_inv)  # scale_inv = mantissa * 2**exponent, 0.5 <= m < 1
    rounded_up = torch.ldexp(torch.ones_like(scale_inv), exponent)
    return torch.where((mantissa == 0.5) | ~scale_inv.isfinite(), scale_inv, rounded_up)


def _to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    # Before torch 2.12 the cast does not saturate: 448.01 may become NaN. It keeps the sign of a
    # NaN, which depends on the processor and on the element's position in a vector register.
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).nan_to_num_(nan=math.nan).to(E4M3)
