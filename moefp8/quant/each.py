"""Quantize weights at any addresses into a stack of E4M3 weights, e.g. those that a trainer sends.

M matrices [N, K], given one by one or as stacks [n, N, K], become some of the S matrices of a
stack. In W^T, `parts` of them are side by side: 2 for gate and up. Numerics are those of
`numerics.py`. On a Hopper GPU each launch of `each.cu` takes up to 256 matrices, each CTA a tile.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import attrgetter, or_
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..kernels.common.blocks import (
    BLOCK,
    E4M3,
    TMA_BYTES,
    ceil_div,
    divisor_of,
    num_blocks,
    round_up,
)
from ..kernels.common.checks import (
    FLOATS,
    INPUTS,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch, current_driver
from ..kernels.program import Codes, Place, Record, Target, Tensor, Word, prepare_launch
from ..kernels.registry import any_watches, register
from ..kernels.targets import GEMMS, target_of
from . import numerics

_OP = "quantize_128x128_each_into"
_DTYPE, _SHAPE, _DEVICE = map(attrgetter, ("dtype", "shape", "device"))
Matrices = Sequence[torch.Tensor]
Places = Sequence[int]


class Stack(NamedTuple):
    """FP8 weights, each matrix with 128x128 blocks of its own.

    data: e4m3 [S, N, K], and scale_inv: fp32 [S, ceil(N/128), ceil(K/128)], both contiguous.
    transposed: W^T of data, e4m3 [S / parts, K, parts * width], N <= width <= N rounded up to 128;
    or None. Columns after the N of a part become zeros.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    transposed: torch.Tensor | None
    parts: int


def _check(stack: Stack, matrices: Matrices, places: Places) -> None:
    check_stack(stack)
    data = stack.data
    if not _are_like(data, matrices):
        _check_matrices(data, matrices)
    num_matrices = sum(x.shape[0] if x.ndim == 3 else 1 for x in matrices)
    if num_matrices != len(places):
        raise ValueError(
            f"{_OP}: each matrix must have a place, got {num_matrices} matrices and "
            f"{len(places)} places"
        )
    if places and not (min(places) >= 0 and max(places) < len(data)):
        raise ValueError(
            f"{_OP}: places must be in [0, {len(data)}), got {min(places)} to {max(places)}"
        )


def _are_like(data: torch.Tensor, matrices: Sequence[torch.Tensor]) -> bool:
    """Whether all are matrices that fit the stack; a few passes in C find out."""
    return (
        set(map(_SHAPE, matrices)) == {data.shape[1:]}
        and set(map(_DEVICE, matrices)) == {data.device}
        and len(set(map(_DTYPE, matrices))) == 1
        and matrices[0].dtype in FLOATS
        and all(map(torch.Tensor.is_contiguous, matrices))
    )


def _check_matrices(data: torch.Tensor, matrices: Sequence[torch.Tensor]) -> None:
    for w in matrices:
        check_tensor(_OP, "matrices", w, FLOATS)
        if w.ndim not in (2, 3) or w.shape[-2:] != data.shape[1:]:
            raise ValueError(
                f"{_OP}: matrices must be [N, K] or [n, N, K] with [N, K] = "
                f"{list(data.shape[1:])}, as in the stack, got {list(w.shape)}"
            )
        check_same_device(_OP, data=data, matrices=w)
        if w.dtype != matrices[0].dtype:
            raise TypeError(
                f"{_OP}: matrices must have one dtype, got {matrices[0].dtype} and {w.dtype}"
            )
        if not w.is_contiguous():
            raise ValueError(
                f"{_OP}: matrices must be contiguous, got strides {list(w.stride())} for shape "
                f"{list(w.shape)}"
            )


def check_stack(stack: Stack) -> None:
    """Raise TypeError or ValueError unless the stack is as `Stack` says."""
    data, scale_inv, transposed, parts = stack
    check_tensor(_OP, "data", data, (E4M3,), 3)
    check_tensor(_OP, "scale_inv", scale_inv, (torch.float32,), 3)
    size, n, k = data.shape
    scale_shape = [size, num_blocks(n), num_blocks(k)]
    check_shape(_OP, "scale_inv", scale_inv, scale_shape, "[S, ceil(N/128), ceil(K/128)]")
    check_same_device(_OP, data=data, scale_inv=scale_inv)
    for name, x in (("data", data), ("scale_inv", scale_inv)):
        if not x.is_contiguous():
            raise ValueError(
                f"{_OP}: {name} must be contiguous, got strides {list(x.stride())} for shape "
                f"{list(x.shape)}"
            )
    if size > MAX_STACK:
        raise ValueError(f"{_OP}: data must have at most {MAX_STACK} matrices, got {size}")
    if parts < 1 or size % parts:
        raise ValueError(f"{_OP}: parts must be at least 1 and divide S = {size}, got {parts}")
    if transposed is None:
        return
    check_tensor(_OP, "transposed", transposed, (E4M3,), 3)
    check_same_device(_OP, data=data, transposed=transposed)
    check_rows_contiguous(_OP, "transposed", transposed)
    *rows, columns = transposed.shape
    most = parts * round_up(n, BLOCK)
    if rows != [size // parts, k] or columns % parts or not parts * n <= columns <= most:
        raise ValueError(
            f"{_OP}: transposed must be {[size // parts, k, 'columns']}, with columns a multiple "
            f"of parts = {parts} from {parts * n} to {most}, got {list(transposed.shape)}"
        )


def _body(stack: Stack, matrices: Matrices, places: Places) -> None:
    _check(stack, matrices, places)
    data, scale_inv, transposed, parts = stack
    n = data.shape[1]
    each = [w for x in matrices for w in (x if x.ndim == 3 else [x])]
    for w, place in zip(each, places, strict=True):
        numerics.quantize_128x128_into(w, data[place], scale_inv[place])
        if transposed is not None:
            matrix, part = divmod(place, parts)
            columns = transposed[matrix].view(torch.uint8).unflatten(-1, (parts, -1))[:, part]
            columns[:, :n].copy_(data[place].view(torch.uint8).mT)
            columns[:, n:].zero_()


def _addresses(matrices: Sequence[torch.Tensor], num_matrices: int) -> list[int]:
    """The address of each matrix, also of each one in a stack."""
    if len(matrices) == num_matrices:
        return list(map(torch.Tensor.data_ptr, matrices))
    addresses: list[int] = []
    for x in matrices:
        begin, size = x.data_ptr(), x.shape[-2] * x.shape[-1] * x.element_size()
        addresses += range(begin, begin + x.nbytes, size)
    return addresses


def _launch(stack: Stack, matrices: Matrices, places: Places) -> None:
    """One kernel on the current stream for each 256 matrices that have elements."""
    _check(stack, matrices, places)
    _launch_checked(stack, matrices, places)


def _launch_checked(stack: Stack, matrices: Matrices, places: Places) -> None:
    data, scale_inv, transposed, parts = stack
    if data.numel() == 0 or not places:
        return
    dtype, k, device_index = matrices[0].dtype, data.shape[2], data.get_device()
    layouts = layout_of(data), None if transposed is None else layout_of(transposed)
    stack_addresses = (
        data.data_ptr(),
        scale_inv.data_ptr(),
        0 if transposed is None else transposed.data_ptr(),
    )
    all_addresses = _addresses(matrices, len(places))
    num_launches = -(-len(places) // MAX_MATRICES)
    step = -(-len(places) // num_launches)  # launches of one size share a prepared launch
    for first in range(0, len(places), step):
        addresses = all_addresses[first : first + step]
        words = words_of(places[first : first + step])
        vectorized = is_vectorized(k, addresses, data, transposed, parts)
        size = len(addresses)
        launch = prepared(
            (_OP, size, dtype, *layouts, parts, vectorized),
            lambda size=size, vectorized=vectorized: _prepare(  # type: ignore[misc]
                stack, size, dtype, vectorized=vectorized
            ),
        )
        launch.on(device_index, (*stack_addresses, *addresses, *words))


def _prepare(stack: Stack, num_matrices: int, dtype: torch.dtype, *, vectorized: bool) -> Launch:
    """The launch for `num_matrices` matrices of a dtype.

    A call gives the addresses of data, scales, W^T (0 if there is none) and each matrix, then the
    words of `words_of`.
    """
    data, scale_inv, transposed, parts = stack
    matrices = [f"w{i}" for i in range(num_matrices)]
    places = [f"places{i}" for i in range(num_words(num_matrices))]
    device_index = data.get_device()
    r = Record(target_of(device_index), ("out", "out_scales", "transposed", *matrices, *places))
    describe_each(
        r,
        [Place(name) for name in matrices],
        dtype,
        [Word(name) for name in places],
        Codes.of(data, scale_inv, "out"),
        None if transposed is None else Tensor.of(transposed, "transposed"),
        parts,
        vectorized=vectorized,
    )
    return prepare_launch(r, device_index)


def _with_stack(body: Callable[[Stack, Matrices, Places], None]) -> Callable[..., None]:
    return lambda *arguments: body(Stack(*arguments[:4]), *arguments[4:])


# Quantizes `matrices`, [N, K] or stacks [n, N, K], contiguous, of one dtype (bf16, fp16 or fp32):
# matrix i becomes matrix places[i] of the stack, which is as in `Stack`. Places differ.
quantize_128x128_each_into = register(
    f"{_OP}(Tensor(a!) data, Tensor(b!) scale_inv, Tensor(c!)? transposed, int parts, "
    "Tensor[] matrices, int[] places) -> ()",
    _with_stack(_body),
    _with_stack(_check),
    _with_stack(_launch),
)


def quantize_each(stack: Stack, matrices: Matrices, places: Places) -> None:
    """`quantize_128x128_each_into` without its checks, for a caller that has made them.

    Where our kernel runs, each matrix costs the host a tenth of a microsecond.
    """
    if not any_watches() and current_driver().arch(stack.data.get_device()) in GEMMS:
        _launch_checked(stack, matrices, places)
        written = [x for x in stack[:3] if x is not None]
        torch.autograd.graph.increment_version(written)
    else:
        quantize_128x128_each_into(*stack, list(matrices), list(places))


# ---- The kernel ----

MAX_MATRICES = 256  # of one launch, since a kernel takes 4 KiB of arguments
MAX_STACK = 1 << 16
_SOURCE = Path(__file__).with_name("each.cu")
_PLACES_PER_WORD = 4
_VECTOR_BYTES = TMA_BYTES  # bytes that a thread loads at once, if they are aligned
_VECTOR = 8  # elements of a load, and bytes of their codes
_TILE = 128  # rows and columns of a tile
_THREADS = 256
_AMAX_BYTES = _THREADS // 32 * 4
_MAX_TILES = 2**31 - 2**10  # `Divisor` takes n < 2**31; threads count past the last column


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

    transposed: the stack may also keep W^T.
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
