"""Dispatch gradients to experts: quantize each token once, plan its rows, copy it to them.

T tokens, k choices each, E experts, H hidden, R = T k rows.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from ...kernels.common.blocks import (
    E4M3,
    MIN_GRADIENT_AMAX,
    empty_tma_aligned,
    num_blocks,
    round_up,
)
from ...kernels.common.checks import FLOATS, check_same_device, check_shape, check_tensor
from ...kernels.common.prepared import Launches, layout_of, prepared
from ...kernels.gemm.sizes import Sizes
from ...kernels.jit import Kernel
from ...kernels.program import (
    Codes,
    Place,
    Record,
    Span,
    Target,
    Tensor,
    kernels_of,
    prepare_launches,
)
from ...kernels.registry import register_inputs
from ...kernels.targets import target_of
from ...quant.quantize import quantize_1x128
from ...routing.dispatch import describe_dispatch, dispatch_rows
from ...routing.plan import MapPlaces, build_plan
from ..expert_parts import CallTensors

_OP = "quantized_rows"


class RowsInputs(NamedTuple):
    """The inputs of `quantized_rows`.

    grad: [T, H] bf16, fp16 or fp32. top_k_index: int32 or int64 [T, k].
    num_experts, expert_offset, num_global_experts: as in `build_plan`.
    """

    grad: torch.Tensor
    top_k_index: torch.Tensor
    num_experts: int
    expert_offset: int
    num_global_experts: int | None


class Rows(NamedTuple):
    """The results of `quantized_rows`. Rows of no expert are undefined.

    data, scale_inv: e4m3 [R, H] and fp32 scales of 1x128 blocks [R, ceil(H/128)].
    expert_offsets, token_to_row: int32 [E + 1] and [T, k], the places of rows, which are those of a
        forward with the same choices. A token that chooses one expert twice has one row for both
        choices in PyTorch, and two on a Hopper GPU.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    expert_offsets: torch.Tensor
    token_to_row: torch.Tensor


def _allocate(inputs: RowsInputs) -> Rows:
    """Check, then allocate; this is also the fake body."""
    grad, ids = inputs.grad, inputs.top_k_index
    check_same_device(_OP, grad=grad, top_k_index=ids)
    check_tensor(_OP, "grad", grad, FLOATS, 2)
    check_tensor(_OP, "top_k_index", ids, (torch.int32, torch.int64), 2)
    check_shape(_OP, "top_k_index", ids, [len(grad), ids.shape[1]], "[T, k] for grad [T, H]")
    num_rows, h = ids.numel(), grad.shape[1]
    data = grad.new_empty((num_rows, round_up(h, 16)), dtype=E4M3)[:, :h]
    return Rows(
        data,
        empty_tma_aligned((num_rows, num_blocks(h)), grad.device),
        ids.new_empty(inputs.num_experts + 1, dtype=torch.int32),
        ids.new_empty(ids.shape, dtype=torch.int32),
    )


def _body(inputs: RowsInputs) -> Rows:
    rows = _allocate(inputs)
    grad, ids, num_experts, expert_offset, num_global_experts = inputs
    plan = build_plan(
        ids, num_experts, expert_offset=expert_offset, num_global_experts=num_global_experts
    )
    quantized = quantize_1x128(grad, False, MIN_GRADIENT_AMAX)
    codes, scales = (dispatch_rows(y, plan.row_to_token) for y in quantized)
    for y, value in zip(rows, (codes, scales, plan.expert_offsets, plan.token_to_row), strict=True):
        if y.dtype == E4M3:
            y.view(torch.uint8).copy_(value.view(torch.uint8))
        else:
            y.copy_(value)
    return rows


_INPUTS = "grad", "ids", "rows", "rows_scales", "expert_offsets", "token_to_row"


def _launch(inputs: RowsInputs) -> Rows:
    rows = _allocate(inputs)
    data, scale_inv = rows[:2]
    grad, ids, num_experts, expert_offset, _ = inputs
    if data.numel() == 0:
        return _body(inputs)
    grad = grad if grad.stride(1) == 1 else grad.contiguous()

    def prepare() -> Launches:
        device_index = grad.get_device()
        r = Record(target_of(device_index), _INPUTS)
        describe_dispatch(
            r,
            Tensor.of(grad, "grad"),
            Tensor.of(ids, "ids"),
            Codes.of(data, scale_inv, "rows").batched(),
            num_experts,
            expert_offset=expert_offset,
            maps=MapPlaces(
                r.buffer("tokens_per_expert", 4 * num_experts),
                Place("expert_offsets"),
                Place("token_to_row"),
            ),
            min_amax=MIN_GRADIENT_AMAX,
        )
        return prepare_launches(r, device_index)

    key = (_OP, layout_of(grad), layout_of(ids), grad.data_ptr() % 16, *inputs[2:])
    addresses = tuple([y.data_ptr() for y in (grad, ids, *rows)])
    prepared(key, prepare)(grad.get_device(), addresses)
    return rows


def quantized_rows_kernels(target: Target, sizes: Sizes) -> Iterator[Kernel]:
    """The kernels of `quantized_rows` of BF16 gradients, for up to `sizes.num_tokens` tokens."""

    def describe(span: Span, tensors: CallTensors) -> Record:
        some = sizes._replace(num_tokens=span.first)
        r = Record(target, ("grad", "ids"), span=span)
        rows = r.codes("rows", (1, some.num_tokens * some.top_k, some.hidden_size))
        grad, ids = tensors.tokens("grad", some), tensors.choices(some).ids
        describe_dispatch(r, grad, ids, rows, some.num_experts)
        return r

    for is_aligned in (True, False):
        tensors = CallTensors(is_aligned=is_aligned)
        yield from kernels_of(partial(describe, tensors=tensors), sizes.num_tokens)


quantized_rows = register_inputs(
    _OP,
    RowsInputs,
    "(Tensor data, Tensor scale_inv, Tensor expert_offsets, Tensor token_to_row)",
    reference=_body,
    fake=_allocate,
    kernels=_launch,
)
"""`RowsInputs` -> `Rows`: a plan of rows, and in each row the gradient of its token, quantized with
`MIN_GRADIENT_AMAX`. Raises TypeError, ValueError."""


def tokens_of_rows(token_to_row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int32 [R]: the token of each row, and -1 for rows of no choice."""
    num_tokens, top_k = token_to_row.shape
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=token_to_row.device)
    is_none = (token_to_row < 0) | (token_to_row >= num_rows)
    at = token_to_row.long().masked_fill(is_none, num_rows).flatten()
    row_tokens = tokens.new_full((num_rows + 1,), -1)
    return row_tokens.scatter_(0, at, tokens.repeat_interleave(top_k))[:num_rows]
