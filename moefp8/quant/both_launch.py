"""Launch `both.cu`, which quantizes weights and transposes their codes, on a Hopper GPU.

E matrices of N rows of K weights, in parts of n = N / parts rows.
"""

from pathlib import Path

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.divisor import Divisor
from ..kernels.jit import Kernel, Launch, Source, current_driver, pointers, struct_of

_SOURCE = Path(__file__).with_name("both.cu")
_Arguments = struct_of(_SOURCE)
_VECTOR_BYTES = 16  # a thread loads as many at once, if they are aligned
_VECTOR = 8  # elements of a load, and bytes of their codes
_TILE = 128  # rows and columns of a tile
_THREADS = 256
_SHARED_BYTES = _TILE * _TILE + _THREADS // 32 * 4
_MAX_TILES = 2**31 - 2**10  # `Divisor` is right for these, and columns past the last one count on


def alignments(*tensors: torch.Tensor) -> tuple[int, ...]:
    """What of their addresses decides about a launch."""
    return tuple(x.data_ptr() % _VECTOR_BYTES for x in tensors)


def _pitches(x: torch.Tensor) -> tuple[int, int]:
    """Bytes from one matrix to the next, and from one row; 0 where there is but one."""
    x = x[(None,) * (3 - x.ndim)]
    matrix, row = (x.stride(i) * x.element_size() if x.shape[i] > 1 else 0 for i in (0, 1))
    return matrix, row


def kernel_of(dtype: torch.dtype, *, vectorized: bool) -> Kernel:
    """vectorized: eight weights can be loaded at once, and sixteen codes stored."""
    return Kernel(_SOURCE, f"both_kernel<{INPUTS[dtype]}, {str(vectorized).lower()}>")


def needed_kernels(dtype: torch.dtype, k: int) -> list[Kernel]:
    """The kernels for weights of K columns, which may lie anywhere."""
    flags = (True, False) if k % _VECTOR == 0 else (False,)
    return [kernel_of(dtype, vectorized=flag) for flag in flags]


def prepare_both(
    w: torch.Tensor,
    parts: int,
    data: torch.Tensor,
    transposed: torch.Tensor,
    sources: tuple[Source, Source, Source, Source] = (Source(0), Source(1), Source(2), Source(3)),
) -> Launch:
    """The launch for w [N, K] or [E, N, K], of at least one element; layout and alignment count.

    Args:
        parts: divides N.
        data: e4m3 of the shape of w, contiguous, as the scales are.
        transposed: e4m3 [..., K, parts * width], n <= width <= n rounded up to 128.
        sources: the addresses of w, data, scales and what is transposed.
    """
    driver, device_index = current_driver(), w.get_device()
    num_matrices, num_rows, k = w.shape[0] if w.ndim == 3 else 1, w.shape[-2] // parts, w.shape[-1]
    width = transposed.shape[-1] // parts
    w_matrix_pitch, w_row_pitch = _pitches(w)
    matrix_pitch, row_pitch = _pitches(transposed)
    num_k_tiles, num_row_tiles = ceil_div(k, _TILE), ceil_div(num_rows, _TILE)
    num_tiles = num_matrices * parts * num_row_tiles * num_k_tiles
    if max(num_tiles, num_rows, k) > _MAX_TILES:
        raise ValueError(
            f"quantize_128x128_both: one call takes at most {_MAX_TILES} tiles of {_TILE}x{_TILE}, "
            f"rows and columns, got {list(w.shape)}, {num_tiles} tiles; split the tensor"
        )
    steps = (w_matrix_pitch, w_row_pitch, matrix_pitch, row_pitch, width)
    vectorized = (
        k % _VECTOR == 0
        and not any(x % _VECTOR_BYTES for x in (*steps, *alignments(w, transposed)))
        and data.data_ptr() % _VECTOR == 0
    )
    arguments = _Arguments(
        w_matrix_pitch=w_matrix_pitch,
        w_part_pitch=num_rows * w_row_pitch,
        w_row_pitch=w_row_pitch,
        transposed_matrix_pitch=matrix_pitch,
        transposed_row_pitch=row_pitch,
        num_rows=num_rows,
        k=k,
        width=width,
        num_k_tiles=Divisor.of(num_k_tiles),
        num_row_tiles=Divisor.of(num_row_tiles),
        num_parts=Divisor.of(parts),
    )
    of_w, of_data, of_scales, of_transposed = sources
    return Launch(
        driver.load(kernel_of(w.dtype, vectorized=vectorized), device_index),
        num_tiles,
        _THREADS,
        (arguments,),
        pointers(_Arguments, w=of_w, data=of_data, scale_inv=of_scales, transposed=of_transposed),
        shared_bytes=_SHARED_BYTES,
    )
