"""Describe `transpose.cu`, which transposes the codes of weights.

E matrices of N rows of K codes, in parts of n = N / parts rows.
"""

from collections.abc import Iterator
from pathlib import Path

from ..kernels.common.blocks import E4M3, TMA_BYTES, ceil_div
from ..kernels.common.divisor import divisor_of
from ..kernels.jit import Kernel
from ..kernels.program import Record, Target, Tensor

_SOURCE = Path(__file__).with_name("transpose.cu")
_VECTOR_BYTES = TMA_BYTES  # a thread moves as many at once, if they are aligned
_TILE = 128  # rows and columns of a tile
_THREADS = 256
_SHARED_BYTES = _TILE * _TILE
_MAX_TILES = 2**31 - 2**10  # `Divisor` is right for these, and columns past the last one count on


def kernel_of(*, vectorized: bool) -> Kernel:
    """vectorized: sixteen codes can be moved at once."""
    return Kernel(_SOURCE, f"transpose_kernel<{str(vectorized).lower()}>")


def transpose_kernels(target: Target, k: int) -> Iterator[Kernel]:
    """The kernels for weights of K columns, at any addresses."""
    for alignment in (TMA_BYTES, 1):
        r = Record(target, ("w", "out"))
        w = Tensor.contiguous("w", 1, k, dtype=E4M3, alignment=alignment)
        describe_transpose(r, w, 1, Tensor.contiguous("out", k, _TILE, dtype=E4M3))
        yield from r.kernels


def describe_transpose(
    r: Record, w: Tensor, parts: int, out: Tensor, *, programmatic: bool = False
) -> None:
    """One step: row i of part p of w becomes column p * width + i of out.

    The next kernel may start before this one ends. If that is a GEMM launched as programmatic, it
    takes its weights for older than this kernel, so what is written here must not be these weights.

    Args:
        w: [N, K] or [E, N, K], one byte each, columns contiguous.
        parts: divides N.
        out: [K, parts * width] or [E, K, parts * width], columns contiguous, with at least one
            byte; n <= width, and columns of a part after its n become zeros.
        programmatic: it may start before the stream's previous kernel ends; it reads and writes
            after that end.

    Raises:
        ValueError: there are more tiles, rows or columns than a kernel can count.
    """
    w_matrix_pitch, w_row_pitch = pitches_of(w)
    out_matrix_pitch, out_row_pitch = pitches_of(out)
    num_rows, k, width = w.shape[-2] // parts, w.shape[-1], out.shape[-1] // parts
    num_k_tiles, num_row_tiles = ceil_div(k, _TILE), ceil_div(width, _TILE)
    num_matrices = w.shape[0] if w.ndim == 3 else 1
    num_tiles = num_matrices * parts * num_row_tiles * num_k_tiles
    if max(num_tiles, width, k) > _MAX_TILES:
        raise ValueError(
            f"transpose_codes: one call takes at most {_MAX_TILES} tiles of {_TILE}x{_TILE}, rows "
            f"and columns, got {list(w.shape)}, {num_tiles} tiles; split the tensor"
        )
    arguments = {
        "w": w.place,
        "out": out.place,
        "w_matrix_pitch": w_matrix_pitch,
        "w_part_pitch": num_rows * w_row_pitch,
        "w_row_pitch": w_row_pitch,
        "out_matrix_pitch": out_matrix_pitch,
        "out_row_pitch": out_row_pitch,
        "num_rows": num_rows,
        "k": k,
        "width": width,
        "num_k_tiles": divisor_of(num_k_tiles),
        "num_row_tiles": divisor_of(num_row_tiles),
        "num_parts": divisor_of(parts),
    }
    steps = w_matrix_pitch, w_row_pitch, k, out_matrix_pitch, out_row_pitch, width
    is_even = not any(x % _VECTOR_BYTES for x in steps)
    r.step(
        kernel_of(vectorized=w.is_aligned and out.is_aligned and is_even),
        num_tiles,
        _THREADS,
        arguments,
        programmatic=programmatic,
        shared_bytes=_SHARED_BYTES,
    )


def pitches_of(x: Tensor) -> tuple[int, int]:
    """Bytes from one matrix to the next, and from one row; 0 where there is but one."""
    if x.ndim == 2:
        x = x.batched()
    matrix, row = (x.bytes_of_stride(i) if x.shape[i] > 1 else 0 for i in (0, 1))
    return matrix, row
