"""Copy every token to the rows of its experts. T tokens, E experts, R rows of the layout.

`GroupedExperts` quantizes each token on the way, and a Hopper GPU does that and the plan in one
kernel: see `dispatch_launch.py`.
"""

from typing import Any

import torch

from ..kernels.common.checks import FLOATS, check_same_device
from .combine import first_choices, is_transformed, sum_rows
from .plan import RoutingPlan


def dispatch(x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """Copy every token to its rows; padding rows become zeros.

    Its gradient is the sum of the rows of each token, in FP32 and in the order of its choices.

    Args:
        x: [T, ...] of any dtype, FP8 included.

    Returns:
        [R, ...] in the contiguous layout, [E, max_m, ...] in the masked one.

    Raises:
        ValueError: `x` has another number of tokens than the plan, or is on another device.
    """
    num_tokens = plan.token_to_row.shape[0]
    if x.ndim < 1 or x.shape[0] != num_tokens:
        raise ValueError(f"dispatch: x must be [T = {num_tokens}, ...], got {list(x.shape)}")
    check_same_device("dispatch", x=x, plan=plan.row_to_token)
    if x.requires_grad and torch.is_grad_enabled() and x.dtype in FLOATS and not is_transformed():
        rows = _Dispatch.apply(x, plan.row_to_token, plan.token_to_row)
    else:
        rows = dispatch_rows(x, plan.row_to_token)
    return rows.view(*plan.row_shape, *x.shape[1:])


def dispatch_rows(x: torch.Tensor, row_to_token: torch.Tensor) -> torch.Tensor:
    """[R, ...]: row r is x[row_to_token[r]], or zeros where that is -1."""
    if len(x) == 0:  # in the masked layout there may be rows all the same
        return x.new_zeros(len(row_to_token), *x.shape[1:])
    values = x.view(torch.uint8) if x.dtype.itemsize == 1 else x  # FP8 has few ops of its own
    rows = values.index_select(0, row_to_token.clamp(min=0))
    rows.masked_fill_((row_to_token < 0).view(-1, *[1] * (x.ndim - 1)), 0)
    return rows if values is x else rows.view(x.dtype)


class _Dispatch(torch.autograd.Function):
    """PyTorch would add up a token's rows in its own dtype, and on a GPU in any order."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, row_to_token: torch.Tensor, token_to_row: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(token_to_row)
        return dispatch_rows(x, row_to_token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (token_to_row,) = ctx.saved_tensors
        rows = grad.unsqueeze(-1).flatten(1)
        of_tokens = sum_rows(rows, token_to_row, first_choices(token_to_row))
        return of_tokens.view(len(token_to_row), *grad.shape[1:]), None, None
