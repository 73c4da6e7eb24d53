"""Launch `each.cu`, which quantizes matrices at any addresses into a stack, on a Hopper GPU.

M matrices [N, K] of a stack of S, in whose transpose `parts` matrices are side by side.
"""

from array import array
from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.divisor import Divisor
from ..kernels.jit import (
    Kernel,
    Launch,
    Pointer,
    Source,
    current_driver,
    offset_of,
    pointers,
    struct_of,
)

MAX_MATRICES = 256  # of one launch, since a kernel takes 4 KiB of arguments
MAX_STACK = 1 << 16
_SOURCE = Path(__file__).with_name("each.cu")
_Arguments = struct_of(_SOURCE)
_PLACES_PER_WORD = 4
_VECTOR_BYTES = 16  # a thread loads as many at once, if they are aligned
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


def kernel_of(dtype: torch.dtype, *, vectorized: bool, transposed: bool) -> Kernel:
    """vectorized: eight weights can be loaded at once, and sixteen codes stored."""
    flags = ", ".join(str(flag).lower() for flag in (vectorized, transposed))
    return Kernel(_SOURCE, f"each_kernel<{INPUTS[dtype]}, {flags}>")


def needed_kernels(dtype: torch.dtype, k: int, *, transposed: bool) -> list[Kernel]:
    """The kernels for weights of K columns, which may lie anywhere.

    transposed: W^T may be kept, and be written with them.
    """
    return [
        kernel_of(dtype, vectorized=vectorized, transposed=is_written)
        for vectorized in ((True, False) if k % _VECTOR == 0 else (False,))
        for is_written in ((False, True) if transposed else (False,))
    ]


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


def prepare_each(
    num_matrices: int,
    dtype: torch.dtype,
    data: torch.Tensor,
    transposed: torch.Tensor | None,
    parts: int,
    *,
    vectorized: bool,
) -> Launch:
    """The launch for so many matrices of a dtype, of at least one element.

    A call gives the addresses of data, scales, W^T (0 if there is none) and each matrix, then the
    words of `words_of`.

    Args:
        data: e4m3 [S, N, K], contiguous, as the scales are.
        transposed: e4m3 [S / parts, K, parts * width], N <= width <= N rounded up to 128.
    """
    driver, device_index = current_driver(), data.get_device()
    _, num_rows, k = data.shape
    num_k_tiles, num_row_tiles = ceil_div(k, _TILE), ceil_div(num_rows, _TILE)
    num_tiles = num_matrices * num_row_tiles * num_k_tiles
    if max(num_tiles, num_rows, k) > _MAX_TILES:
        raise ValueError(
            f"quantize_128x128_each_into: {num_matrices} matrices may have {_MAX_TILES} tiles of "
            f"{_TILE}x{_TILE}, rows and columns, got {num_tiles} tiles of {[num_rows, k]}"
        )
    arguments = _Arguments(
        num_rows=num_rows,
        k=k,
        num_k_tiles=Divisor.of(num_k_tiles),
        num_row_tiles=Divisor.of(num_row_tiles),
        num_parts=Divisor.of(parts),
    )
    if transposed is not None:
        arguments.width = transposed.shape[-1] // parts
        arguments.transposed_matrix_pitch, arguments.transposed_row_pitch, _ = transposed.stride()
    num_words = ceil_div(num_matrices, _PLACES_PER_WORD)
    stack = pointers(_Arguments, data=Source(0), scale_inv=Source(1), transposed=Source(2))
    begins = [offset_of(_Arguments, "w") + 8 * i for i in range(num_matrices)]
    begins += [offset_of(_Arguments, "places") + 8 * i for i in range(num_words)]
    each = [Pointer(0, begin, Source(3 + i)) for i, begin in enumerate(begins)]
    shared_bytes = _AMAX_BYTES + (_TILE * _TILE if transposed is not None else 0)
    return Launch(
        driver.load(
            kernel_of(dtype, vectorized=vectorized, transposed=transposed is not None),
            device_index,
        ),
        num_tiles,
        _THREADS,
        (arguments,),
        [*stack, *each],
        shared_bytes=shared_bytes,
    )
