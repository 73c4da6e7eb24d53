"""Launch `transpose.cu`, which transposes the codes of weights, on a Hopper GPU.

E matrices of N rows of K codes, in parts of n = N / parts rows.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import TMA_BYTES, ceil_div
from ..kernels.common.divisor import Divisor
from ..kernels.jit import Kernel, Launch, Source, current_driver, pointers, struct_of

_SOURCE = Path(__file__).with_name("transpose.cu")
_Arguments = struct_of(_SOURCE)
_VECTOR_BYTES = TMA_BYTES  # a thread moves as many at once, if they are aligned
_TILE = 128  # rows and columns of a tile
_THREADS = 256
_SHARED_BYTES = _TILE * _TILE
_MAX_TILES = 2**31 - 2**10  # `Divisor` is right for these, and columns past the last one count on


class Destination(NamedTuple):
    """Where transposed codes go: [E, K, parts * width] bytes, columns contiguous.

    Attributes:
        width: columns of each part, at least n; those behind n become zeros.
        row_pitch: bytes from one row to the next.
        matrix_pitch: bytes from one matrix to the next.
        is_aligned: whether the address that a call gives is a multiple of 16.
    """

    width: int
    row_pitch: int
    matrix_pitch: int
    is_aligned: bool = True

    @classmethod
    def of(cls, out: torch.Tensor, parts: int) -> "Destination":
        """That of a tensor [K, parts * width] or [E, K, parts * width]."""
        matrix_pitch, row_pitch = _pitches(out)
        return cls(out.shape[-1] // parts, row_pitch, matrix_pitch, is_aligned(out))


def is_aligned(x: torch.Tensor) -> bool:
    """Whether x begins where a thread can move many bytes at once."""
    return x.data_ptr() % _VECTOR_BYTES == 0


def _pitches(x: torch.Tensor) -> tuple[int, int]:
    """Bytes from one matrix to the next, and from one row; 0 where there is but one."""
    x = x[(None,) * (3 - x.ndim)]
    matrix, row = (x.stride(i) if x.shape[i] > 1 else 0 for i in (0, 1))
    return matrix, row


def kernel_of(*, vectorized: bool) -> Kernel:
    """vectorized: sixteen codes can be moved at once."""
    return Kernel(_SOURCE, f"transpose_kernel<{str(vectorized).lower()}>")


def needed_kernels(k: int) -> list[Kernel]:
    """The kernels for weights of K columns, which may lie anywhere."""
    flags = (True, False) if k % _VECTOR_BYTES == 0 else (False,)
    return [kernel_of(vectorized=flag) for flag in flags]


def prepare_transpose(
    w: torch.Tensor,
    parts: int,
    out: Destination,
    sources: tuple[Source, Source] = (Source(0), Source(1)),
    *,
    programmatic: bool = False,
) -> Launch:
    """The launch for w [N, K] or [E, N, K], one byte each, whose layout and alignment count.

    Row i of part p goes to column p * out.width + i.

    Args:
        parts: divides N.
        out: has at least one byte.
        sources: the addresses of w and of what is written. If w and `out` are aligned, so are they.
        programmatic: it may be launched before the stream's previous kernel ends, and waits for it.

    The next kernel may start before this one ends. If that is a GEMM launched as programmatic, it
    takes its weights for older than this kernel, so what is written here must not be these weights.
    """
    driver, device_index = current_driver(), w.get_device()
    w_matrix_pitch, w_row_pitch = _pitches(w)
    num_rows, k = w.shape[-2] // parts, w.shape[-1]
    num_k_tiles, num_row_tiles = ceil_div(k, _TILE), ceil_div(out.width, _TILE)
    num_matrices = w.shape[0] if w.ndim == 3 else 1
    num_tiles = num_matrices * parts * num_row_tiles * num_k_tiles
    if max(num_tiles, out.width, k) > _MAX_TILES:
        raise ValueError(
            f"transpose_codes: one call takes at most {_MAX_TILES} tiles of {_TILE}x{_TILE}, rows "
            f"and columns, got {list(w.shape)}, {num_tiles} tiles; split the tensor"
        )
    steps = (w_matrix_pitch, w_row_pitch, k, out.matrix_pitch, out.row_pitch, out.width)
    vectorized = is_aligned(w) and out.is_aligned and not any(x % _VECTOR_BYTES for x in steps)
    arguments = _Arguments(
        w_matrix_pitch=w_matrix_pitch,
        w_part_pitch=num_rows * w_row_pitch,
        w_row_pitch=w_row_pitch,
        out_matrix_pitch=out.matrix_pitch,
        out_row_pitch=out.row_pitch,
        num_rows=num_rows,
        k=k,
        width=out.width,
        num_k_tiles=Divisor.of(num_k_tiles),
        num_row_tiles=Divisor.of(num_row_tiles),
        num_parts=Divisor.of(parts),
    )
    of_w, of_out = sources
    return Launch(
        driver.load(kernel_of(vectorized=vectorized), device_index),
        num_tiles,
        _THREADS,
        (arguments,),
        pointers(_Arguments, w=of_w, out=of_out),
        shared_bytes=_SHARED_BYTES,
        programmatic=programmatic,
    )
