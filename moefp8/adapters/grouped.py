"""Grouped products of BF16 rows, as adapters of experts take them. R rows, E experts.

PyTorch's grouped GEMM computes them on a Hopper GPU. It wants rows of multiples of 16 bytes.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ..kernels.common.blocks import round_up
from ..kernels.common.checks import check_same_device, check_shape, check_tensor
from ..kernels.common.registry import register_inputs

_NT, _OUTER = "grouped_bf16_nt", "grouped_bf16_outer"
_ALIGNED = 8  # elements of BF16 in 16 bytes


class NTInputs(NamedTuple):
    """rows: bf16 [R, K]. weight: bf16 [E, N, K]. expert_offsets: int32 [E + 1], from 0 on."""

    rows: torch.Tensor
    weight: torch.Tensor
    expert_offsets: torch.Tensor


class OuterInputs(NamedTuple):
    """a: bf16 [R, N]. b: bf16 [R, K]. expert_offsets: int32 [E + 1], from 0 on."""

    a: torch.Tensor
    b: torch.Tensor
    expert_offsets: torch.Tensor


def _check_nt(inputs: NTInputs) -> None:
    rows, weight, offsets = inputs
    check_same_device(_NT, **inputs._asdict())
    check_tensor(_NT, "rows", rows, (torch.bfloat16,), 2)
    check_tensor(_NT, "weight", weight, (torch.bfloat16,), 3)
    num_experts, _, k = weight.shape
    check_shape(_NT, "rows", rows, [rows.shape[0], k], "[R, K] for weight [E, N, K]")
    _check_offsets(_NT, offsets, num_experts)


def _allocate_nt(inputs: NTInputs) -> torch.Tensor:
    """Check, then allocate the result; this is also the fake body."""
    _check_nt(inputs)
    n = inputs.weight.shape[1]
    return inputs.rows.new_empty(inputs.rows.shape[0], round_up(n, _ALIGNED))[:, :n]


def _allocate_outer(inputs: OuterInputs) -> torch.Tensor:
    a, b, offsets = inputs
    check_same_device(_OUTER, **inputs._asdict())
    check_tensor(_OUTER, "a", a, (torch.bfloat16,), 2)
    check_tensor(_OUTER, "b", b, (torch.bfloat16,), 2)
    check_shape(_OUTER, "b", b, [a.shape[0], b.shape[1]], "[R, K] for a [R, N]")
    _check_offsets(_OUTER, offsets, offsets.shape[0] - 1)
    return a.new_empty(offsets.shape[0] - 1, a.shape[1], b.shape[1])


def _check_offsets(op: str, offsets: torch.Tensor, num_experts: int) -> None:
    check_tensor(op, "expert_offsets", offsets, (torch.int32,), 1)
    check_shape(op, "expert_offsets", offsets, [num_experts + 1], "[E + 1]")


def _body_nt(inputs: NTInputs) -> torch.Tensor:
    y = _allocate_nt(inputs).zero_()
    for weight, (begin, end) in zip(inputs.weight, pairwise(inputs[2].tolist()), strict=True):
        y[begin:end] = inputs.rows[begin:end] @ weight.t()
    return y


def _body_outer(inputs: OuterInputs) -> torch.Tensor:
    products = _allocate_outer(inputs)
    for product, (begin, end) in zip(products, pairwise(inputs[2].tolist()), strict=True):
        torch.mm(inputs.a[begin:end].t(), inputs.b[begin:end], out=product)
    return products


def _hopper_nt(inputs: NTInputs) -> torch.Tensor:
    """PyTorch's kernel, on the current stream; nothing waits for it."""
    _check_nt(inputs)
    rows, weight, offsets = inputs
    if 0 in (*rows.shape, *weight.shape):
        return rows.new_zeros(rows.shape[0], weight.shape[1])
    wide = _padded(_padded(weight, 1), 2)
    return _grouped_mm(_fitting(_padded(rows, 1)), _fitting(wide).mT, offsets)[:, : weight.shape[1]]


def _hopper_outer(inputs: OuterInputs) -> torch.Tensor:
    products = _allocate_outer(inputs)
    a, b, offsets = inputs
    if products.numel() == 0 or a.shape[0] == 0:
        return products.zero_()
    found = _grouped_mm(_fitting(_padded(a, 1)).t(), _fitting(_padded(b, 1)), offsets)
    return found[:, : a.shape[1], : b.shape[1]].contiguous()


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    multiply: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm  # the latter before 2.10
    product: torch.Tensor = multiply(a, b, offs=offsets[1:])
    return product


def _padded(x: torch.Tensor, axis: int) -> torch.Tensor:
    """x with zeros behind, so that the axis is a multiple of 8 long."""
    missing = round_up(x.shape[axis], _ALIGNED) - x.shape[axis]
    return F.pad(x, (*[0, 0] * (x.ndim - 1 - axis), 0, missing)) if missing else x


def _fitting(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if PyTorch's kernel would refuse how it lies."""
    inner, outer = sorted(x.stride()[-2:])
    if inner == 1 and outer % _ALIGNED == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


grouped_nt = register_inputs(
    _NT, NTInputs, "Tensor", cpu=_body_nt, fake=_allocate_nt, hopper=_hopper_nt
)
"""bf16 [R, N]: row r is `rows[r] @ weight[e].T` for its expert e: `NTInputs`. Expert e has rows
[expert_offsets[e], expert_offsets[e + 1]); others are not defined."""
grouped_outer = register_inputs(
    _OUTER, OuterInputs, "Tensor", cpu=_body_outer, fake=_allocate_outer, hopper=_hopper_outer
)
"""bf16 [E, N, K]: `a.T @ b` of the rows of each expert, to which rows of none add nothing, whatever
they hold: `OuterInputs`."""
