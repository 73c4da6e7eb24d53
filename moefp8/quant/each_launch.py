"""Describe `each.cu`, which quantizes matrices at any addresses into a stack.

M matrices [N, K] of a stack of S, in whose transpose `parts` matrices are side by side.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch

from ..kernels.common.blocks import E4M3, TMA_BYTES, ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.divisor import divisor_of
from ..kernels.jit import Kernel
from ..kernels.program import Codes, Place, Record, Target, Tensor, Word

MAX_MATRICES = 256  # of one launch, since a kernel takes 4 KiB of arguments
MAX_STACK = 1 << 16
_SOURCE = Path(__file__).with_name("each.cu")
_PLACES_PER_WORD = 4
_VECTOR_BYTES = TMA_BYTES  # a thread loads as many at once, if they are aligned
_VECTOR = 8  # elements of a load, and bytes of their codes
_TILE = 128  # rows and columns of a tile
_THREADS = 256
_AMAX_BYTES = _THREADS // 32 * 4
_MAX_TILES = 2**31 - 2**10  # `Divisor` is right for these, and columns past the last one count on


def words_of(places: Sequence[int]) -> tuple[int, ...]:
    """Places in the stack as the kernel reads them, four to a word."""
    packed = array("H", places)
    packed.extend([0] * (-len(packed) % _PLACES_PER_WORD))
    return tuple(memoryview(packed).cast("B").cast("Q"))


def num_words(num_places: int) -> int:
    """How many words `words_of` makes."""
    return ceil_div(num_places, _PLACES_PER_WORD)


def kernel_of(dtype: torch.dtype, *, vectorized: bool, transposed: bool) -> Kernel:
    """vectorized: eight weights can be loaded at once, and sixteen codes stored."""
    flags = ", ".join(str(flag).lower() for flag in (vectorized, transposed))
    return Kernel(_SOURCE, f"each_kernel<{INPUTS[dtype]}, {flags}>")


def each_kernels(
    target: Target, dtype: torch.dtype, k: int, *, transposed: bool
) -> Iterator[Kernel]:
    """The kernels for weights of K columns, at any addresses.

    transposed: W^T may be kept, and be written with them.
    """
    outs = [None, Tensor.contiguous("transposed", 1, k, _TILE, dtype=E4M3)]
    for vectorized in (True, False) if k % _VECTOR == 0 else (False,):
        for out in outs if transposed else outs[:1]:
            r = Record(target, ("w", "places", "out", "out_scales", "transposed"))
            codes = Codes.contiguous("out", 1, 1, k)
            matrices, places = [Place("w")], [Word("places")]
            describe_each(r, matrices, dtype, places, codes, out, 1, vectorized=vectorized)
            yield from r.kernels


def is_vectorized(
    k: int,
    addresses: Sequence[int],
    data: torch.Tensor,
    transposed: torch.Tensor | None,
    parts: int,
) -> bool:
    """Whether weights at these addresses can be loaded, and codes stored, many at once."""
    if k % _VECTOR or data.data_ptr() % _VECTOR or reduce(or_, addresses) % _VECTOR_BYTES:
        return False
    if transposed is None:
        return True
    *pitches, columns = *transposed.stride()[:-1], transposed.shape[-1] // parts
    return not any(x % _VECTOR_BYTES for x in (transposed.data_ptr(), *pitches, columns))


def describe_each(
    r: Record,
    matrices: Sequence[Place],
    dtype: torch.dtype,
    places: Sequence[Word],
    out: Codes,
    transposed: Tensor | None,
    parts: int,
    *,
    vectorized: bool,
) -> None:
    """One step that writes matrices of a stack: codes, 128x128 scales, and codes transposed.

    Args:
        matrices: [N, K] of the dtype, contiguous, at most `MAX_MATRICES` and at least one element.
        places: what `words_of` makes of their places in the stack.
        out: e4m3 [S, N, K], contiguous, as the scales are.
        transposed: e4m3 [S / parts, K, parts * width], N <= width <= N rounded up to 128, or None.
        vectorized: as `is_vectorized` says.

    Raises:
        ValueError: there are more tiles, rows or columns than a kernel can count.
    """
    _, num_rows, k = out.data.shape
    num_k_tiles, num_row_tiles = ceil_div(k, _TILE), ceil_div(num_rows, _TILE)
    num_tiles = len(matrices) * num_row_tiles * num_k_tiles
    if max(num_tiles, num_rows, k) > _MAX_TILES:
        raise ValueError(
            f"quantize_128x128_each_into: {len(matrices)} matrices may have {_MAX_TILES} tiles of "
            f"{_TILE}x{_TILE}, rows and columns, got {num_tiles} tiles of {[num_rows, k]}"
        )
    arguments: dict[str, Any] = {
        "data": out.data.place,
        "scale_inv": out.scale_inv.place,
        "w": matrices,
        "places": places,
        "num_rows": num_rows,
        "k": k,
        "num_k_tiles": divisor_of(num_k_tiles),
        "num_row_tiles": divisor_of(num_row_tiles),
        "num_parts": divisor_of(parts),
    }
    if transposed is not None:
        arguments |= {
            "transposed": transposed.place,
            "transposed_matrix_pitch": transposed.strides[0],
            "transposed_row_pitch": transposed.strides[1],
            "width": transposed.shape[-1] // parts,
        }
    r.step(
        kernel_of(dtype, vectorized=vectorized, transposed=transposed is not None),
        num_tiles,
        _THREADS,
        arguments,
        programmatic=False,
        shared_bytes=_AMAX_BYTES + (_TILE * _TILE if transposed is not None else 0),
    )
