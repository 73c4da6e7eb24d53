"""The routing plan, and the moves it describes: dispatch to expert rows, combine back to tokens.

T tokens, k choices each, E experts, R rows. Maps read from_to; -1 is padding.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ..kernels.common.checks import FLOATS, check_same_device, check_shape, check_tensor
from . import plan_op as ops

Layout = Literal["contiguous", "masked"]


@dataclass(frozen=True)
class RoutingPlan:
    """Where every choice of the router lives in the expert layout.

    Contiguous: the R rows of all experts follow one another. Masked: every expert has `max_m`
    rows, so R = E * max_m. Within an expert, rows keep the order of the tokens. R follows from
    T, k and E alone, so it does not depend on the routing.

    Attributes:
        tokens_per_expert: int32 [E]; the `masked_m` of the masked GEMM.
        expert_offsets: int32 [E + 1], the first row of every expert.
        row_to_token: int32 [R].
        row_to_expert: int32 [R]; the `grouped_layout` of the contiguous GEMM.
        token_to_row: int32 [T, k]; -1 for a choice held elsewhere. Two choices of one expert by
            one token share a row.
        max_m: rows per expert in the masked layout, None in the contiguous one.
    """

    tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    row_to_token: torch.Tensor
    row_to_expert: torch.Tensor
    token_to_row: torch.Tensor
    max_m: int | None = None

    @property
    def layout(self) -> Layout:
        return "contiguous" if self.max_m is None else "masked"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """[R] or [E, max_m], the leading axes of tensors in this layout."""
        if self.max_m is None:
            return tuple(self.row_to_token.shape)
        return (self.tokens_per_expert.shape[0], self.max_m)


def build_plan(
    top_k_index: torch.Tensor,
    num_experts: int,
    layout: Layout = "contiguous",
    *,
    alignment: int = 1,
    max_m: int | None = None,
) -> RoutingPlan:
    """Plan the rows of a routing; on the device, with no synchronisation.

    Args:
        top_k_index: int32 or int64 [T, k], ids in [0, E]; E marks a choice held elsewhere (expert
            parallelism), which gets no row. The range is checked on the CPU; on a GPU, where that
            would cost a synchronisation, ids out of range count as E.
        alignment: contiguous only; every segment starts at a multiple of it. 1 wastes no row;
            `get_mk_alignment_for_contiguous_layout()` makes `row_to_expert` fit DeepGEMM.
        max_m: masked only; rows per expert, at least T (the default, and always enough).

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
    """
    if layout not in ("contiguous", "masked"):
        raise ValueError(f"build_plan: layout must be 'contiguous' or 'masked', got {layout!r}")
    if layout == "masked":
        if alignment != 1:
            raise ValueError(f"build_plan: alignment is for 'contiguous' only, got {alignment}")
        max_m = top_k_index.shape[0] if max_m is None else max_m
    elif max_m is not None:
        raise ValueError(f"build_plan: max_m is for 'masked' only, got {max_m}")
    tokens_per_expert, expert_offsets, row_to_token, row_to_expert, token_to_row = ops.build_plan(
        top_k_index, num_experts, alignment, max_m
    )
    return RoutingPlan(
        tokens_per_expert, expert_offsets, row_to_token, row_to_expert, token_to_row, max_m
    )


def dispatch(x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """Copy every token to its rows; padding rows become zeros.

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
    if num_tokens == 0:
        return x.new_zeros((*plan.row_shape, *x.shape[1:]))  # masked, there may be rows
    if x.dtype.itemsize == 1:  # FP8 has few ops of its own
        return _dispatch(x.view(torch.uint8), plan).view(x.dtype)
    return _dispatch(x, plan)


def _dispatch(x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    rows = x.index_select(0, plan.row_to_token.clamp(min=0))
    is_padding = (plan.row_to_token < 0).view(-1, *[1] * (x.ndim - 1))
    return rows.masked_fill_(is_padding, 0).view(*plan.row_shape, *x.shape[1:])


def combine(y: torch.Tensor, plan: RoutingPlan, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Sum the rows of every token, each times its weight, in FP32 and in the order of the choices.

    Deterministic: no atomics. Padding rows are never read into a result, whatever they hold, and
    a choice without a row counts as zero, whatever its weight.

    Args:
        y: [R, H] or [E, max_m, H], as `dispatch` returns; bf16, fp16 or fp32.
        top_k_weights: [T, k] bf16, fp16 or fp32.

    Returns:
        [T, H] in the dtype of `y`.

    Raises:
        TypeError, ValueError: `y` or `top_k_weights` does not fit the plan.
    """
    check_tensor("combine", "y", y, FLOATS, len(plan.row_shape) + 1)
    check_tensor("combine", "top_k_weights", top_k_weights, FLOATS, 2)
    check_same_device("combine", y=y, top_k_weights=top_k_weights, plan=plan.row_to_token)
    check_shape("combine", "y", y, [*plan.row_shape, y.shape[-1]], "[rows of the plan, H]")
    check_shape("combine", "top_k_weights", top_k_weights, plan.token_to_row.shape, "[T, k]")
    rows = y.flatten(0, -2)
    num_tokens, top_k = plan.token_to_row.shape
    result = torch.zeros(num_tokens, y.shape[-1], dtype=torch.float32, device=y.device)
    if num_tokens == 0:
        return result.to(y.dtype)
    for choice in range(top_k):
        row = plan.token_to_row[:, choice]
        weight = top_k_weights[:, choice, None].float()
        term = weight * rows.index_select(0, row.clamp(min=0)).float()
        result = result + term.masked_fill(row[:, None] < 0, 0.0)
    return result.to(y.dtype)
