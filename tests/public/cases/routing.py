"""`moefp8.routing`: choices, plans, dispatch and combine."""

from typing import Any, get_args

import torch

from moefp8.routing import (
    Layout,
    RoutingPlan,
    TopK,
    build_plan,
    combine,
    dispatch,
    sigmoid_group_topk,
    softmax_topk,
)

from . import BF16, attempt, case, choices, randn


@case
def softmax(device: str) -> Any:
    outcomes = {}
    for num_experts, k in ((7, 1), (16, 4), (130, 8), (600, 3)):
        for renormalize in (True, False):
            logits = randn(20, num_experts, device=device, dtype=torch.float32).requires_grad_()
            chosen = softmax_topk(logits=logits, k=k, renormalize=renormalize)
            chosen.top_k_weights.square().sum().backward()
            outcomes[num_experts, k, renormalize] = chosen, logits.grad
    ties = torch.zeros(3, 16, device=device)
    return outcomes, softmax_topk(ties, 4, True)


@case
def sigmoid(device: str) -> Any:
    outcomes = {}
    for num_groups, topk_groups in ((1, 1), (4, 2)):
        for has_bias in (False, True):
            logits = randn(20, 32, device=device, dtype=torch.float32).requires_grad_()
            bias = randn(32, device=device, dtype=torch.float32) if has_bias else None
            chosen = sigmoid_group_topk(
                logits=logits,
                bias=bias,
                k=4,
                num_groups=num_groups,
                topk_groups=topk_groups,
                renormalize=has_bias,
                scaling_factor=2.5,
            )
            chosen.top_k_weights.square().sum().backward()
            outcomes[num_groups, has_bias] = chosen, logits.grad
    return outcomes, sigmoid_group_topk(logits, None, 4)


@case
def plans(device: str) -> Any:
    ids, _ = choices(19, 3, 6, device)
    alike = {"tokens": ids, "as int32": ids.int(), "none": ids[:0]}
    made = {
        name: [
            build_plan(top_k_index=x, num_experts=6, layout="contiguous", alignment=128),
            build_plan(x, 6),
            build_plan(x, 6, "masked", max_m=24),
            build_plan(x, 2, expert_offset=2, num_global_experts=6),
        ]
        for name, x in alike.items()
    }
    shapes = [(x.layout, x.row_shape) for plans in made.values() for x in plans]
    return made, shapes, get_args(Layout)


@case
def there_and_back(device: str) -> Any:
    ids, scores = choices(19, 3, 6, device)
    outcomes = {}
    for layout in ("contiguous", "masked"):
        plan = build_plan(ids, 6, layout)
        for dtype in (BF16, torch.float32):
            x = randn(19, 40, device=device, dtype=dtype)
            rows = dispatch(x=x, plan=plan)
            y = combine(y=rows.to(BF16), plan=plan, top_k_weights=scores)
            outcomes[layout, dtype] = rows, y
    return outcomes


@case
def made_by_hand(device: str) -> Any:
    plan = build_plan(choices(5, 2, 4, device)[0], 4)
    same = RoutingPlan(
        tokens_per_expert=plan.tokens_per_expert,
        expert_offsets=plan.expert_offsets,
        row_to_token=plan.row_to_token,
        row_to_expert=plan.row_to_expert,
        token_to_row=plan.token_to_row,
        max_m=None,
    )
    return same, TopK(top_k_index=plan.token_to_row, top_k_weights=plan.token_to_row.float())


@case
def errors(device: str) -> Any:
    ids, scores = choices(5, 2, 4, device)
    plan = build_plan(ids, 4)
    logits = randn(4, 6, device=device, dtype=torch.float32)
    return [
        attempt(lambda: build_plan(ids, 4, "rows")),
        attempt(lambda: build_plan(ids, 4, "masked", alignment=128)),
        attempt(lambda: build_plan(ids, 4, max_m=9)),
        attempt(lambda: build_plan(ids.float(), 4)),
        attempt(lambda: dispatch(randn(6, 8, device=device), plan)),
        attempt(lambda: combine(randn(3, 8, device=device), plan, scores)),
        attempt(lambda: softmax_topk(logits, 7, True)),
        attempt(lambda: sigmoid_group_topk(logits, None, 2, 4, 2)),
    ]
