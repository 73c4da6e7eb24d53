"""Faults of `routing/`."""

from ..fault import Fault

_DISPATCH = "tests/routing/test_dispatch.py::"
_EXPERTS = "tests/functional/experts/test_launch.py::"

FAULTS = [
    Fault(
        file="routing/plan.py",
        old="choice_to_row.view(top_k_index.shape).gather(1, first_same)",
        new="choice_to_row.view(top_k_index.shape)",
        caught_by="tests/routing/test_plan.py::test_a_rank_plans_for_its_own_experts[masked]",
        why="the second of two equal choices of a token has no row",
    ),
    Fault(
        file="routing/plan.py",
        old='"is_wide": ids.element_size() == 8,',
        new='"is_wide": False,',
        caught_by=_EXPERTS + "test_launches_compute_what_the_body_does[out of range-False-few]",
        why="half of an id of 64 bits is read as an id",
    ),
    Fault(
        file="routing/plan.py",
        old='"first_expert": expert_offset,',
        new='"first_expert": 0,',
        caught_by=_EXPERTS + "test_a_rank_computes_what_its_experts_do",
        why="a rank takes tokens of the first rank's experts",
    ),
    Fault(
        file="routing/dispatch.py",
        old='"scale_pitch": rows.scale_inv.strides[2],',
        new='"scale_pitch": rows.scale_inv.shape[1],',
        caught_by=_EXPERTS + "test_launches_compute_what_the_body_does[distinct-False-few]",
        why="the pitch of rows' scales is not a multiple of 16 bytes",
    ),
    Fault(
        file="routing/dispatch.cu",
        old="before += other < expert || (other == expert && i < lane);",
        new="before += other < expert;",
        caught_by=_DISPATCH
        + "test_dispatch_equals_its_parts[distinct-False-(4, 8, 5, 130, torch.float16, 1)]",
        why="all tokens of an expert are written to its first row",
    ),
    Fault(
        file="routing/combine.py",
        old="rows.numel() > 0 and rows.shape[1] % 8 == 0 and rows.stride(0) >= rows.shape[1]",
        new="rows.numel() > 0 and rows.stride(0) >= rows.shape[1]",
        caught_by="tests/routing/test_combine.py::"
        "test_rows_that_the_kernel_cannot_read_are_combined_by_pytorch[amid a unit]",
        why="the kernel reads past the end of the last row",
    ),
    Fault(
        file="routing/top_k.py",
        old="by_group.sort(dim=-1, descending=True).values[..., :2]",
        new="by_group.sort(dim=-1, descending=True).values[..., :1]",
        caught_by="tests/routing/test_top_k.py::test_sigmoid_group_topk_at_deepseek_size",
        why="groups are chosen by their best expert alone",
    ),
    Fault(
        file="routing/route.py",
        old="key = (_OP, layout_of(x), layout_of(weight), bias_layout, *rest)",
        new="key = (_OP, layout_of(x), layout_of(weight), *rest)",
        caught_by="tests/routing/test_route.py::"
        "test_a_bias_is_no_part_of_what_was_prepared_without_one",
        why="a router without a bias makes others of its layout forget theirs",
    ),
]
