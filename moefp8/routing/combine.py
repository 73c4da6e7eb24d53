"""Sum the rows of every token, each times its weight. T tokens, k choices, R rows, H hidden.

`GroupedExperts` ends with the same bodies: on a Hopper GPU with `combine.cu`, elsewhere with
`combine_rows`.
"""

from typing import Any

import torch
from torch import _C
from torch.autograd import forward_ad

from ..kernels.common.checks import FLOATS, check_same_device, check_shape, check_tensor
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.common.registry import register
from ..kernels.jit import Source, launch_all
from .combine_launch import CombineSources, prepare_combine
from .plan import RoutingPlan

_OP = "combine"
_SOURCES = CombineSources(*map(Source, range(4)))


def combine(y: torch.Tensor, plan: RoutingPlan, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Sum the rows of every token, each times its weight, in FP32 and in the order of the choices.

    Deterministic: no atomics. Padding rows are never read into a result, whatever they hold, and
    a choice without a row counts as zero, whatever its weight. Differentiable.

    Args:
        y: [R, H] or [E, max_m, H], as `dispatch` returns; bf16, fp16 or fp32.
        top_k_weights: [T, k] bf16, fp16 or fp32.

    Returns:
        [T, H] in the dtype of `y`.

    Raises:
        TypeError, ValueError: `y` or `top_k_weights` does not fit the plan.
    """
    check_tensor(_OP, "y", y, FLOATS, len(plan.row_shape) + 1)
    check_shape(_OP, "y", y, [*plan.row_shape, y.shape[-1]], "[rows of the plan, H]")
    rows = y.flatten(0, -2)
    inputs = rows, plan.token_to_row, top_k_weights
    if forward_ad._current_level >= 0 or _C._functorch.peek_interpreter_stack() is not None:
        return combine_rows(*_checked(*inputs))  # of operations that transforms know
    if torch.is_grad_enabled() and (y.requires_grad or top_k_weights.requires_grad):
        return _Combine.apply(*inputs)
    return _combine(*inputs)


def combine_rows(
    rows: torch.Tensor, token_to_row: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The numerics, in PyTorch: rows [R, H], token_to_row int32 [T, k], of which -1 is no row."""
    num_tokens, top_k = token_to_row.shape
    result = torch.zeros(num_tokens, rows.shape[-1], dtype=torch.float32, device=rows.device)
    if num_tokens == 0:
        return result.to(rows.dtype)
    for choice in range(top_k):
        row = token_to_row[:, choice]
        weight = top_k_weights[:, choice, None].float()
        term = weight * rows.index_select(0, row.clamp(min=0)).float()
        result = result + term.masked_fill(row[:, None] < 0, 0.0)
    return result.to(rows.dtype)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return _combine(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """d rows[r] is the sum of weights[t, j] * grad[t], d weights[t, j] is rows[r] . grad[t].

        Over all t and j with token_to_row[t, j] == r.
        """
        rows, token_to_row, weights = ctx.saved_tensors
        grad = grads[0].float()
        of_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        of_weights = torch.zeros_like(weights)
        for choice in range(token_to_row.shape[1] if len(rows) else 0):
            row, is_here = token_to_row[:, choice], token_to_row[:, choice, None] >= 0
            at = row.clamp(min=0)
            term = weights[:, choice, None].float() * grad
            of_rows.index_add_(0, at, term.masked_fill(~is_here, 0.0))
            product = (rows.index_select(0, at).float() * grad).masked_fill(~is_here, 0.0)
            of_weights[:, choice] = product.sum(dim=-1)
        return of_rows.to(rows.dtype), None, of_weights


# ---- The op ----


def _checked(
    rows: torch.Tensor, token_to_row: torch.Tensor, top_k_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_tensor(_OP, "top_k_weights", top_k_weights, FLOATS, 2)
    check_same_device(_OP, y=rows, top_k_weights=top_k_weights, plan=token_to_row)
    check_shape(_OP, "top_k_weights", top_k_weights, token_to_row.shape, "[T, k]")
    return rows, token_to_row, top_k_weights


def _allocate(*inputs: torch.Tensor) -> torch.Tensor:
    """Check, then allocate the result. Also the fake body."""
    rows, token_to_row, _ = _checked(*inputs)
    return rows.new_empty(token_to_row.shape[0], rows.shape[1])


def _body(*inputs: torch.Tensor) -> torch.Tensor:
    return combine_rows(*_checked(*inputs))


def _has_kernel(rows: torch.Tensor, token_to_row: torch.Tensor, *_: object) -> bool:
    """Whether `combine.cu` takes them: aligned rows of BF16, none of which ends amid 16 bytes."""
    aligned = (rows.data_ptr() | rows.stride(0) * 2) % 16 == 0 and rows.stride(1) == 1
    whole = rows.numel() > 0 and rows.shape[1] % 8 == 0 and rows.stride(0) >= rows.shape[1]
    in_order = token_to_row.dtype == torch.int32 and token_to_row.is_contiguous()
    return rows.dtype == torch.bfloat16 and aligned and whole and in_order


def _launch(
    rows: torch.Tensor, token_to_row: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """One kernel on the current stream; nothing waits for it."""
    out = _allocate(rows, token_to_row, top_k_weights)
    if out.numel():
        key = (_OP, layout_of(rows), layout_of(token_to_row), layout_of(top_k_weights))
        launch = prepared(key, lambda: _prepare(rows, top_k_weights))
        tensors = (rows, token_to_row, top_k_weights, out)
        launch_all((launch,), rows.get_device(), tuple([x.data_ptr() for x in tensors]))
    return out


def _prepare(rows: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
    return prepare_combine(
        top_k_weights,
        rows.shape[1],
        y_row_pitch=rows.stride(0),
        out_is_aligned=True,
        sources=_SOURCES,
    )


_combine = register(
    f"{_OP}(Tensor rows, Tensor token_to_row, Tensor top_k_weights) -> Tensor",
    _body,
    _allocate,
    _launch,
    cuda=_body,
    hopper_takes=_has_kernel,
)
