"""The routing plan, and the moves it describes: dispatch to expert rows, combine back to tokens.

T tokens, k choices each, E experts, R rows. Maps read from_to; -1 is padding.
"""

from dataclasses import dataclass
from typing import Literal

import torch

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
