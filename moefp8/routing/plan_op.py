"""Turn the router's choices into row maps. T tokens, k choices, E experts, R rows of the layout.

Every expert owns one segment of rows; within it, rows keep the order of the tokens. All shapes
follow from T, k and E, so nothing has to be read back from the device.
"""

import torch
from torch.nn.functional import pad

from ..kernels.common.checks import check_choices, check_tensor
from ..kernels.common.registry import register
from .plan_launch import launch_plan

_OP = "build_plan"


def num_contiguous_rows(num_choices: int, num_experts: int, alignment: int) -> int:
    """R that holds any routing of `num_choices` when segments start at multiples of `alignment`."""
    num_segments = min(num_experts, num_choices)
    return (num_choices + num_segments * (alignment - 1)) // alignment * alignment


def _check(top_k_index: torch.Tensor, num_experts: int, alignment: int, max_m: int | None) -> None:
    check_tensor(_OP, "top_k_index", top_k_index, (torch.int32, torch.int64), 2)
    if top_k_index.shape[1] < 1:
        raise ValueError(f"{_OP}: top_k_index must be [T, k] with k of at least 1, got k = 0")
    if num_experts < 1:
        raise ValueError(f"{_OP}: num_experts must be at least 1, got {num_experts}")
    if alignment < 1:
        raise ValueError(f"{_OP}: alignment must be at least 1, got {alignment}")
    if max_m is not None and max_m < top_k_index.shape[0]:
        raise ValueError(
            f"{_OP}: max_m must be at least T = {top_k_index.shape[0]}, since every token may "
            f"choose the same expert, got {max_m}"
        )


def _allocate(
    top_k_index: torch.Tensor, num_experts: int, alignment: int, max_m: int | None
) -> tuple[torch.Tensor, ...]:
    """Check, then allocate the five maps in the order of the schema. Also the fake body."""
    _check(top_k_index, num_experts, alignment, max_m)
    num_tokens, top_k = top_k_index.shape
    if max_m is None:
        num_rows = num_contiguous_rows(num_tokens * top_k, num_experts, alignment)
    else:
        num_rows = num_experts * max_m
    shapes = [(num_experts,), (num_experts + 1,), (num_rows,), (num_rows,), (num_tokens, top_k)]
    return tuple(top_k_index.new_empty(shape, dtype=torch.int32) for shape in shapes)


def build_maps(
    top_k_index: torch.Tensor, num_experts: int, alignment: int, max_m: int | None
) -> tuple[torch.Tensor, ...]:
    maps = _allocate(top_k_index, num_experts, alignment, max_m)
    tokens_per_expert, expert_offsets, row_to_token, row_to_expert, token_to_row = maps
    top_k, num_rows, device = top_k_index.shape[1], row_to_token.shape[0], top_k_index.device

    # 1. The expert of every choice; E where it has no row of its own. A token that names one
    #    expert twice gets one row there, which the combine reads twice.
    first_same = (top_k_index[:, :, None] == top_k_index[:, None, :]).int().argmax(dim=-1)
    is_first = first_same == torch.arange(top_k, device=device)
    is_here = (top_k_index >= 0) & (top_k_index < num_experts)
    expert = torch.where(is_first & is_here, top_k_index, num_experts).long().flatten()

    # 2. Segments: their sizes, and where each starts.
    ones = torch.ones_like(expert)
    counts = expert.new_zeros(num_experts + 1).scatter_add_(0, expert, ones)
    tokens_per_expert.copy_(counts[:num_experts])
    if max_m is None:
        segment_rows = (counts[:num_experts] + alignment - 1) // alignment * alignment
    else:
        segment_rows = torch.full_like(counts[:num_experts], max_m)
    expert_offsets.copy_(pad(segment_rows.cumsum(0), (1, 0)))

    # 3. The row of every choice: the start of its segment plus its rank among that expert's.
    order = expert.argsort(stable=True)
    sorted_expert = expert[order]
    rank = ones.cumsum(0) - 1 - (counts.cumsum(0) - counts)[sorted_expert]
    has_row = sorted_expert < num_experts
    row = torch.where(has_row, expert_offsets[sorted_expert] + rank, num_rows)

    # 4. The maps both ways; slot R collects the choices that have no row.
    for row_map, value in ((row_to_token, order // top_k), (row_to_expert, sorted_expert)):
        row_map.copy_(expert.new_full((num_rows + 1,), -1).scatter_(0, row, value)[:num_rows])
    choice_to_row = torch.empty_like(expert).scatter_(0, order, torch.where(has_row, row, -1))
    token_to_row.copy_(choice_to_row.view(top_k_index.shape).gather(1, first_same))
    return maps


def _cpu(
    top_k_index: torch.Tensor, num_experts: int, alignment: int, max_m: int | None
) -> tuple[torch.Tensor, ...]:
    """Also checks the ids, which only on a CPU costs no synchronisation."""
    _check(top_k_index, num_experts, alignment, max_m)
    check_choices(_OP, top_k_index, num_experts)
    return build_maps(top_k_index, num_experts, alignment, max_m)


def launch_build_plan(
    top_k_index: torch.Tensor, num_experts: int, alignment: int, max_m: int | None
) -> tuple[torch.Tensor, ...]:
    """`build_plan` on a Hopper GPU: one kernel on the current stream; nothing waits for it."""
    maps = _allocate(top_k_index, num_experts, alignment, max_m)
    launch_plan(_OP, top_k_index, num_experts, alignment, max_m, maps)
    return maps


build_plan = register(
    "build_plan(Tensor top_k_index, int num_experts, int alignment, SymInt? max_m) -> "
    "(Tensor tokens_per_expert, Tensor expert_offsets, Tensor row_to_token, "
    "Tensor row_to_expert, Tensor token_to_row)",
    cpu=_cpu,
    fake=_allocate,
    hopper=launch_build_plan,
    cuda=build_maps,
)
