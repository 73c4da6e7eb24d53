"""Quantize weights at any addresses into a stack of E4M3 weights: what comes of a trainer.

M matrices [N, K] become some of the S matrices of a stack; they come one by one or as stacks
[n, N, K]. In the transpose, `parts` of them are side by side: 2 for gate and up. Numerics are those
of `numerics.py`.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from ..kernels.common.blocks import BLOCK, E4M3, num_blocks, round_up
from ..kernels.common.checks import (
    FLOATS,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.common.registry import any_watches, register
from ..kernels.gemm.tuned import target_of
from ..kernels.jit import Launch, current_driver
from ..kernels.program import Codes, Place, Record, Tensor, Word, prepare_launch
from . import numerics
from .each_launch import (
    MAX_MATRICES,
    MAX_STACK,
    describe_each,
    is_vectorized,
    num_words,
    words_of,
)

_OP = "quantize_128x128_each_into"
_DTYPE, _SHAPE, _DEVICE = map(attrgetter, ("dtype", "shape", "device"))
Matrices = Sequence[torch.Tensor]
Places = Sequence[int]


class Stack(NamedTuple):
    """FP8 weights as matrices that are cut into blocks one by one.

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
    """Whether all are matrices that fit the stack: a few passes tell, each in C."""
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


def check_stack(checked: Stack) -> None:
    """Raise TypeError or ValueError for a stack that is not as `Stack` says."""
    data, scale_inv, transposed, parts = checked
    check_tensor(_OP, "data", data, (E4M3,), 3)
    check_tensor(_OP, "scale_inv", scale_inv, (torch.float32,), 3)
    stack, n, k = data.shape
    wanted = [stack, num_blocks(n), num_blocks(k)]
    check_shape(_OP, "scale_inv", scale_inv, wanted, "[S, ceil(N/128), ceil(K/128)]")
    check_same_device(_OP, data=data, scale_inv=scale_inv)
    for name, x in (("data", data), ("scale_inv", scale_inv)):
        if not x.is_contiguous():
            raise ValueError(
                f"{_OP}: {name} must be contiguous, got strides {list(x.stride())} for shape "
                f"{list(x.shape)}"
            )
    if stack > MAX_STACK:
        raise ValueError(f"{_OP}: data must have at most {MAX_STACK} matrices, got {stack}")
    if parts < 1 or stack % parts:
        raise ValueError(f"{_OP}: parts must be at least 1 and divide S = {stack}, got {parts}")
    if transposed is None:
        return
    check_tensor(_OP, "transposed", transposed, (E4M3,), 3)
    check_same_device(_OP, data=data, transposed=transposed)
    check_rows_contiguous(_OP, "transposed", transposed)
    *rows, columns = transposed.shape
    most = parts * round_up(n, BLOCK)
    if rows != [stack // parts, k] or columns % parts or not parts * n <= columns <= most:
        raise ValueError(
            f"{_OP}: transposed must be {[stack // parts, k, 'columns']}, with columns a multiple "
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
    """Where each matrix begins, also each of a stack."""
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
    step = -(-len(places) // num_launches)  # launches of the same size share one that is prepared
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
    """The launch for so many matrices of a dtype.

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


# Quantizes each of `matrices`, [N, K] or stacks [n, N, K], contiguous and of one dtype (bf16, fp16
# or fp32), into the place of the stack that `places` tells for it. The stack is as in `Stack`.
# Places differ.
quantize_128x128_each_into = register(
    f"{_OP}(Tensor(a!) data, Tensor(b!) scale_inv, Tensor(c!)? transposed, int parts, "
    "Tensor[] matrices, int[] places) -> ()",
    _with_stack(_body),
    _with_stack(_check),
    _with_stack(_launch),
)


def quantize_each(stack: Stack, matrices: Matrices, places: Places) -> None:
    """`quantize_128x128_each_into` for a caller that has checked all that it checks.

    Where a kernel of ours runs, a matrix then takes a tenth of a microsecond of the host.
    """
    if not any_watches() and current_driver().runs_our_kernels(stack.data.get_device()):
        _launch_checked(stack, matrices, places)
        written = [x for x in stack[:3] if x is not None]
        torch.autograd.graph.increment_version(written)
    else:
        quantize_128x128_each_into(*stack, list(matrices), list(places))
