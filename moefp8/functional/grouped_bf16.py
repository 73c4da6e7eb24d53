"""Grouped products of BF16 rows, by PyTorch. R rows, E experts, r rank.

PyTorch's grouped GEMM computes them on a Hopper GPU. It needs rows of multiples of 16 bytes.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ..kernels.common.blocks import zero_padded
from ..kernels.common.checks import check_same_device, check_shape, check_tensor
from ..kernels.registry import Written, register_inputs

_ADD, _OUTER = "add_low_rank", "grouped_bf16_outer"
_ALIGNED = 8  # elements of BF16 in 16 bytes


class AddInputs(NamedTuple):
    """The inputs of `add_low_rank`.

    y: bf16 [R, ...], N elements a row; the op adds to it. x: bf16 [R, K].
    a: bf16 [E, r, K]. b: bf16 [E, N, r]. expert_offsets: int32 [E + 1], from 0 on.
    """

    y: Written
    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    expert_offsets: torch.Tensor


class OuterInputs(NamedTuple):
    """a: bf16 [R, N]. b: bf16 [R, K]. expert_offsets: int32 [E + 1], from 0 on."""

    a: torch.Tensor
    b: torch.Tensor
    expert_offsets: torch.Tensor


# ---- The product of an adapter ----


def _check_add(inputs: AddInputs) -> None:
    y, x, a, b, _, offsets = inputs
    check_same_device(_ADD, y=y, x=x, a=a, b=b, expert_offsets=offsets)
    for name, tensor, ndim in (("y", y, None), ("x", x, 2), ("a", a, 3), ("b", b, 3)):
        check_tensor(_ADD, name, tensor, (torch.bfloat16,), ndim)
    (num_rows, k), (num_experts, rank, _), n = x.shape, a.shape, b.shape[1]
    check_shape(_ADD, "a", a, [num_experts, rank, k], "[E, r, K] for x [R, K]")
    check_shape(_ADD, "b", b, [num_experts, n, rank], "[E, N, r] for a [E, r, K]")
    if y.ndim < 2 or (y.shape[0], y.shape[1:].numel()) != (num_rows, n):
        raise ValueError(f"{_ADD}: y must be [R, N] = {[num_rows, n]}, got {list(y.shape)}")
    _check_offsets(_ADD, offsets, num_experts)


def _allocate_u(inputs: AddInputs) -> torch.Tensor:
    """Check, then allocate the result; this is also the fake body."""
    _check_add(inputs)
    return inputs.x.new_empty(inputs.x.shape[0], inputs.a.shape[1])


def _add(inputs: AddInputs) -> torch.Tensor:
    u = _allocate_u(inputs).zero_()
    y, x, a, b, scaling, offsets = inputs
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        rows = slice(begin, end)
        u[rows] = scaling * (x[rows] @ a[expert].t())
        y[rows] += (u[rows] @ b[expert].t()).view(y[rows].shape)
    return u


def _launch_add(inputs: AddInputs) -> torch.Tensor:
    """With PyTorch's kernels, on the current stream; nothing waits for them."""
    _check_add(inputs)
    y, x, a, b, scaling, offsets = inputs
    if 0 in (*x.shape, *a.shape, *b.shape):
        return _allocate_u(inputs).zero_()
    ends = offsets[1:]
    u = scaling * _products(x, a, ends)
    more = _products(u, b, ends)
    y += more if y.ndim == 2 else more.unflatten(1, y.shape[1:])
    return u


def _products(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[R, N] of rows [R, K] and weight [E, N, K]; ends: the row after the last one of each."""
    return _cut(_grouped_mm(_fitting(rows), _fitting(weight).mT, ends), weight.shape[1])


add_low_rank = register_inputs(
    _ADD, AddInputs, "Tensor", reference=_add, fake=_allocate_u, kernels=_launch_add
)
"""For each row, u = scaling * a x with the a of its expert, then y += b u; products are rounded to
BF16: `AddInputs` -> u, bf16 [R, r]. Expert e has rows [expert_offsets[e], expert_offsets[e + 1]);
other rows of y and u are undefined."""


# ---- Its gradient ----


def _allocate_outer(inputs: OuterInputs) -> torch.Tensor:
    """Check, then allocate the result; this is also the fake body."""
    a, b, offsets = inputs
    check_same_device(_OUTER, a=a, b=b, expert_offsets=offsets)
    check_tensor(_OUTER, "a", a, (torch.bfloat16,), 2)
    check_tensor(_OUTER, "b", b, (torch.bfloat16,), 2)
    check_shape(_OUTER, "b", b, [a.shape[0], b.shape[1]], "[R, K] for a [R, N]")
    _check_offsets(_OUTER, offsets, offsets.shape[0] - 1)
    return a.new_empty(offsets.shape[0] - 1, a.shape[1], b.shape[1])


def _outer(inputs: OuterInputs) -> torch.Tensor:
    products = _allocate_outer(inputs)
    for product, (begin, end) in zip(products, pairwise(inputs[2].tolist()), strict=True):
        torch.mm(inputs.a[begin:end].t(), inputs.b[begin:end], out=product)
    return products


def _launch_outer(inputs: OuterInputs) -> torch.Tensor:
    products = _allocate_outer(inputs)
    a, b, offsets = inputs
    if products.numel() == 0 or a.shape[0] == 0:
        return products.zero_()
    products = _grouped_mm(_fitting(a).t(), _fitting(b), offsets[1:])
    return _cut(products, a.shape[1], b.shape[1]).contiguous()


grouped_outer = register_inputs(
    _OUTER, OuterInputs, "Tensor", reference=_outer, fake=_allocate_outer, kernels=_launch_outer
)
"""`OuterInputs` -> bf16 [E, N, K]: `a.T @ b` of the rows of each expert. Rows of no expert add
nothing, whatever they hold."""


# ---- Shared by both ----


def _check_offsets(op: str, offsets: torch.Tensor, num_experts: int) -> None:
    check_tensor(op, "expert_offsets", offsets, (torch.int32,), 1)
    check_shape(op, "expert_offsets", offsets, [num_experts + 1], "[E + 1]")


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    multiply: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm  # the latter before 2.10
    product: torch.Tensor = multiply(a, b, offs=ends)
    return product


def _cut(products: torch.Tensor, *sizes: int) -> torch.Tensor:
    """[R, N] or [E, N, K] without what `_fitting` added; sizes: all but the first."""
    for axis, size in enumerate(sizes, 1):
        if products.shape[axis] != size:
            products = products.narrow(axis, 0, size)
    return products


def _fitting(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if PyTorch's kernel would refuse its sizes, strides or address.

    Zeros are added until `_ALIGNED` divides all sizes but the first, of rows [R, K] or weights
    [E, N, K].
    """
    if (x.shape[1] | x.shape[-1]) % _ALIGNED:
        for axis in range(1, x.ndim):
            x = zero_padded(x, axis, _ALIGNED)
    inner, outer = sorted(x.stride()[-2:])
    if inner == 1 and outer % _ALIGNED == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
