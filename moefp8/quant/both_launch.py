"""Describe `both.cu`, which quantizes weights and transposes their codes.

E matrices of N rows of K weights, in parts of n = N / parts rows.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from ..kernels.common.blocks import E4M3, TMA_BYTES, ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.divisor import divisor_of
from ..kernels.jit import Kernel
from ..kernels.program import Codes, Record, Target, Tensor
from .transpose_launch import pitches_of

_SOURCE = Path(__file__).with_name("both.cu")
_VECTOR_BYTES = TMA_BYTES  # a thread loads as many at once, if they are aligned
_VECTOR = 8  # elements of a load, and bytes of their codes
_TILE = 128  # rows and columns of a tile
_THREADS = 256
_SHARED_BYTES = _TILE * _TILE + _THREADS // 32 * 4
_MAX_TILES = 2**31 - 2**10  # `Divisor` is right for these, and columns past the last one count on


def alignments(*tensors: torch.Tensor) -> tuple[int, ...]:
    """What of their addresses decides about a launch."""
    return tuple(x.data_ptr() % _VECTOR_BYTES for x in tensors)


def kernel_of(dtype: torch.dtype, *, vectorized: bool) -> Kernel:
    """vectorized: eight weights can be loaded at once, and sixteen codes stored."""
    return Kernel(_SOURCE, f"both_kernel<{INPUTS[dtype]}, {str(vectorized).lower()}>")


def both_kernels(target: Target, dtype: torch.dtype, k: int) -> Iterator[Kernel]:
    """The kernels for weights of K columns, at any addresses."""
    for alignment in (TMA_BYTES, dtype.itemsize):
        r = Record(target, ("w", "out", "out_scales", "transposed"))
        w = Tensor.contiguous("w", 1, k, dtype=dtype, alignment=alignment)
        transposed = Tensor.contiguous("transposed", k, _TILE, dtype=E4M3)
        describe_both(r, w, 1, Codes.contiguous("out", 1, k), transposed)
        yield from r.kernels


def describe_both(r: Record, w: Tensor, parts: int, out: Codes, transposed: Tensor) -> None:
    """One step that writes the codes of w, their 128x128 scales, and the codes transposed.

    Args:
        w: [N, K] or [E, N, K], of at least one element, columns contiguous.
        parts: divides N.
        out: e4m3 of the shape of w, contiguous, as the scales are.
        transposed: e4m3 [..., K, parts * width], columns contiguous, n <= width <= n rounded up to
            128.

    Raises:
        ValueError: there are more tiles, rows or columns than a kernel can count.
    """
    num_matrices, num_rows, k = w.shape[0] if w.ndim == 3 else 1, w.shape[-2] // parts, w.shape[-1]
    width = transposed.shape[-1] // parts
    w_matrix_pitch, w_row_pitch = pitches_of(w)
    matrix_pitch, row_pitch = pitches_of(transposed)
    num_k_tiles, num_row_tiles = ceil_div(k, _TILE), ceil_div(num_rows, _TILE)
    num_tiles = num_matrices * parts * num_row_tiles * num_k_tiles
    if max(num_tiles, num_rows, k) > _MAX_TILES:
        raise ValueError(
            f"quantize_128x128_both: one call takes at most {_MAX_TILES} tiles of {_TILE}x{_TILE}, "
            f"rows and columns, got {list(w.shape)}, {num_tiles} tiles; split the tensor"
        )
    arguments = {
        "w": w.place,
        "data": out.data.place,
        "scale_inv": out.scale_inv.place,
        "transposed": transposed.place,
        "w_matrix_pitch": w_matrix_pitch,
        "w_part_pitch": num_rows * w_row_pitch,
        "w_row_pitch": w_row_pitch,
        "transposed_matrix_pitch": matrix_pitch,
        "transposed_row_pitch": row_pitch,
        "num_rows": num_rows,
        "k": k,
        "width": width,
        "num_k_tiles": divisor_of(num_k_tiles),
        "num_row_tiles": divisor_of(num_row_tiles),
        "num_parts": divisor_of(parts),
    }
    steps = w_matrix_pitch, w_row_pitch, matrix_pitch, row_pitch, width
    vectorized = (
        k % _VECTOR == 0
        and w.is_aligned
        and transposed.is_aligned
        and out.data.alignment % _VECTOR == 0
        and not any(x % _VECTOR_BYTES for x in steps)
    )
    r.step(
        kernel_of(w.dtype, vectorized=vectorized),
        num_tiles,
        _THREADS,
        arguments,
        programmatic=False,
        shared_bytes=_SHARED_BYTES,
    )
