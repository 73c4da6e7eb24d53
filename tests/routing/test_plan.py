"""Choices against plain Python; plans by their invariants; dispatch and combine token by token."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.routing import (
    RoutingPlan,
    build_plan,
    combine,
    dispatch,
    sigmoid_group_topk,
    softmax_topk,
)
from moefp8.testing import routings
from tests import naive
from tests.fakes.emulator import emulated

LOGIT = st.floats(-20, 20, width=32)


@given(logits=st.lists(LOGIT, min_size=1, max_size=24), data=st.data(), renormalize=st.booleans())
def test_softmax_topk(logits, data, renormalize):
    k = data.draw(st.integers(1, len(logits)))
    index, weights = softmax_topk(torch.tensor([logits]), k, renormalize)
    expected_index, expected = naive.softmax_topk(logits, k, renormalize)
    assert index[0].tolist() == expected_index
    torch.testing.assert_close(weights[0], torch.tensor(expected), rtol=1e-5, atol=1e-7)


@given(data=st.data(), renormalize=st.booleans(), factor=st.sampled_from((1.0, 2.5)))
def test_sigmoid_group_topk(data, renormalize, factor):
    num_groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    num_experts, topk_groups = num_groups * size, data.draw(st.integers(1, num_groups))
    k = data.draw(st.integers(1, topk_groups * size))
    # Few values, so that ties are common.
    steps = st.lists(st.integers(-3, 3), min_size=num_experts, max_size=num_experts)
    logits = [8.0 * v for v in data.draw(steps)]
    bias = [v / 8 for v in data.draw(steps)]
    arguments = (k, num_groups, topk_groups, renormalize, factor)
    index, weights = sigmoid_group_topk(torch.tensor([logits]), torch.tensor(bias), *arguments)
    scores = torch.tensor(logits).sigmoid()
    biased = (scores + torch.tensor(bias)).tolist()
    assert index[0].tolist() == naive.group_choice(biased, k, num_groups, topk_groups)
    expected = scores[index[0]]
    if renormalize:
        expected = expected / (expected.sum() + 1e-20)
    torch.testing.assert_close(weights[0], expected * factor)


def test_sigmoid_group_topk_at_deepseek_size():
    logits, bias = torch.randn(50, 256), torch.randn(256) * 0.1
    index, weights = sigmoid_group_topk(logits, bias, 8, 8, 4, True, 2.5)
    for token in range(50):
        arguments = (logits[token].tolist(), bias.tolist(), 8, 8, 4, True, 2.5)
        expected_index, expected = naive.sigmoid_group_topk(*arguments)
        assert index[token].tolist() == expected_index
        torch.testing.assert_close(weights[token], torch.tensor(expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_ties_go_to_the_lowest_id(k):
    assert softmax_topk(torch.zeros(5, 8), k, True).top_k_index.tolist() == [list(range(k))] * 5
    index = sigmoid_group_topk(torch.zeros(5, 16), None, k, 4, 2).top_k_index
    assert index.tolist() == [list(range(k))] * 5


def test_bias_steers_the_choice_and_not_the_weights():
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    index, weights = sigmoid_group_topk(torch.zeros(1, 4), bias, 2, renormalize=False)
    assert index.tolist() == [[3, 0]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: softmax_topk(x, 9, True),
            r"softmax_topk: top_k must be in \[1, E\] = \[1, 8\], got 9",
        ),
        (lambda x: softmax_topk(x, 0, True), "got 0"),
        (lambda x: softmax_topk(x[0], 2, True), r"logits must be \[T, E\], got shape \[8\]"),
        (lambda x: sigmoid_group_topk(x, None, 2, 3), "num_groups must divide E = 8, got 3"),
        (lambda x: sigmoid_group_topk(x, None, 2, 4, 5), r"topk_groups must be in .*got 5"),
        (
            lambda x: sigmoid_group_topk(x, None, 3, 4, 1),
            "at most the 2 experts of 1 groups, got 3",
        ),
        (lambda x: sigmoid_group_topk(x, x[0, :3], 2), r"bias must be \[E\] = \[8\], got \[3\]"),
    ],
)
def test_bad_choices_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4, 8))


def check_plan(plan: RoutingPlan, index: torch.Tensor, num_experts: int, alignment: int) -> None:
    """Every map says the same, rows keep token order, and nothing is lost."""
    offsets, row_to_token = plan.expert_offsets.tolist(), plan.row_to_token.tolist()
    seen = {}
    for expert in range(num_experts):
        start = offsets[expert]
        tokens = [t for t in range(index.shape[0]) if expert in index[t].tolist()]
        assert plan.tokens_per_expert[expert] == len(tokens)
        assert start % alignment == 0
        assert row_to_token[start : start + len(tokens)] == tokens
        seen.update({(t, expert): start + rank for rank, t in enumerate(tokens)})
        assert start + len(tokens) <= offsets[expert + 1] <= plan.row_to_token.numel()
    owned = set(seen.values())
    for row, (token, expert) in enumerate(
        zip(row_to_token, plan.row_to_expert.tolist(), strict=True)
    ):
        if row in owned:
            assert seen[token, expert] == row
        else:
            assert (token, expert) == (-1, -1)
    for token, ids in enumerate(index.tolist()):
        for choice, expert in enumerate(ids):
            assert plan.token_to_row[token, choice] == seen.get((token, expert), -1)


@given(routing=routings(7, 3, max_tokens=20), alignment=st.sampled_from((1, 4, 128)))
def test_contiguous_plan(routing, alignment):
    plan = build_plan(routing.top_k_index, 7, alignment=alignment)
    assert plan.layout == "contiguous"
    check_plan(plan, routing.top_k_index, 7, alignment)


@given(routing=routings(5, 2, max_tokens=12), spare=st.sampled_from((0, 3)))
def test_masked_plan(routing, spare):
    max_m = routing.top_k_index.shape[0] + spare
    plan = build_plan(routing.top_k_index.int(), 5, "masked", max_m=max_m)
    assert plan.layout == "masked"
    assert plan.expert_offsets.tolist() == [e * max_m for e in range(6)]
    check_plan(plan, routing.top_k_index, 5, 1)


@given(ids=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=6))
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_repeated_choices_share_a_row(ids, layout):
    index = torch.tensor(ids, dtype=torch.int64).view(-1, 3)
    check_plan(build_plan(index, 3, layout), index, 3, 1)  # id 3 is the sentinel


def test_the_number_of_rows_does_not_depend_on_the_routing():
    even = torch.arange(32).view(16, 2) % 8
    one = torch.tensor([[5, 6]]).expand(16, 2)
    for arguments in ({}, {"alignment": 16}, {"layout": "masked"}):
        shapes = {tuple(build_plan(x, 8, **arguments).row_shape) for x in (even, one)}
        assert len(shapes) == 1


def test_the_plan_is_frozen_and_fits_deep_gemm():
    plan = build_plan(torch.tensor([[0, 2], [2, 1]]), 3, alignment=128)
    assert plan.row_to_expert.dtype == plan.tokens_per_expert.dtype == torch.int32
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.max_m = 3


@given(routing=routings(6, 3, max_tokens=15), seed=st.integers(0, 99))
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_dispatch_and_combine(routing, seed, layout, dtype):
    torch.manual_seed(seed)
    num_tokens = routing.top_k_index.shape[0]
    x = torch.randn(num_tokens, 9).to(dtype)
    plan = build_plan(routing.top_k_index, 6, layout)
    rows = dispatch(x, plan)
    assert rows.shape == (*plan.row_shape, 9)
    assert rows.dtype == dtype
    flat, expected = rows.flatten(0, -2).float(), x.float()
    for row, token in enumerate(plan.row_to_token.tolist()):
        assert torch.equal(flat[row], expected[token] if token >= 0 else torch.zeros(9))
    # A row doubled by its expert's number plus one; NaN in padding must not come through.
    padding = (plan.row_to_token < 0)[:, None]
    y = (flat * (plan.row_to_expert[:, None] + 1)).masked_fill(padding, torch.nan).bfloat16()
    result = combine(y.view(*plan.row_shape, 9), plan, routing.top_k_weights)
    factor = (
        torch.where(routing.top_k_index < 6, routing.top_k_index + 1, 0) * routing.top_k_weights
    )
    torch.testing.assert_close(
        result.float(), expected * factor.sum(1, keepdim=True), rtol=2e-2, atol=1e-2
    )
    again = combine(y.view(*plan.row_shape, 9), plan, routing.top_k_weights)
    assert torch.equal(result, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_without_tokens_are_zeros(dtype):
    plan = build_plan(torch.zeros(0, 2, dtype=torch.int64), 3, "masked", max_m=40)
    for _ in range(20):
        held = torch.full((3, 40, 64), 7.0).to(dtype)  # whose memory is free again right away
        del held
        rows = dispatch(torch.zeros(0, 64).to(dtype), plan)
        assert rows.shape == (3, 40, 64)
        assert not rows.float().any()


def test_dispatch_and_combine_pass_gradients():
    x, weights = torch.randn(3, 4, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 2], [2, 2]])
    plan = build_plan(index, 2)
    combine(dispatch(x, plan), plan, weights).sum().backward()
    here = (index < 2).float()
    torch.testing.assert_close(x.grad, (weights * here).sum(1, keepdim=True).expand(3, 4))
    torch.testing.assert_close(weights.grad, x.sum(1, keepdim=True) * here)


def sum_of(y, weights, plan) -> torch.Tensor:
    return combine(y, plan, weights).float().sum()


def test_combine_is_seen_by_the_transforms_of_functorch_and_by_tangents():
    """Also where a kernel would do it, which sees neither."""
    plan = build_plan(torch.tensor([[0, 1], [1, 2], [0, 2]]), 3)
    y, weights = torch.randn(6, 16).bfloat16(), torch.rand(3, 2)
    with emulated() as gpu:
        leaf = y.clone().requires_grad_()
        sum_of(leaf, weights, plan).backward()
        assert len(gpu.launched) == 1
        of_func = torch.func.grad(sum_of)(y, weights, plan)
        torch.testing.assert_close(of_func, leaf.grad)
        ones = torch.ones_like(y)
        _, tangent = torch.func.jvp(lambda x: sum_of(x, weights, plan), (y,), (ones,))
        torch.testing.assert_close(tangent, leaf.grad.float().sum(), rtol=0.02, atol=0)
        ours = torch.vmap(lambda x: combine(x, plan, weights))(torch.stack([y, 2 * y]))
        torch.testing.assert_close(ours[0], combine(y, plan, weights))


@pytest.mark.parametrize("y", [torch.ones(16).bfloat16().expand(6, 16), torch.ones(6, 16)])
def test_combine_takes_what_its_kernel_cannot(y):
    plan = build_plan(torch.tensor([[0, 1], [1, 2], [0, 2]]), 3)
    wide = dataclasses.replace(plan, token_to_row=plan.token_to_row.long())
    expected = torch.full((3, 16), 0.75, dtype=y.dtype)
    with emulated() as gpu:
        for each in (plan, wide):
            ours = combine(y, each, torch.tensor([[0.5, 0.25]] * 3))
            torch.testing.assert_close(ours, expected)
        assert gpu.launched == []


def test_combine_ignores_the_weight_of_a_choice_held_elsewhere():
    plan = build_plan(torch.tensor([[0, 2]]), 2)
    y = torch.ones(2, 4, dtype=torch.bfloat16)
    assert combine(y, plan, torch.tensor([[1.0, torch.nan]])).tolist() == [[1.0] * 4]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: build_plan(i + 7, 8), r"in \[0, E\] for E = 8 .*got ids from 7 to 10"),
        (lambda i: build_plan(i - 1, 8), "got ids from -1 to 2"),
        (lambda i: build_plan(i.float(), 8), "top_k_index must be int32 or int64, got float32"),
        (lambda i: build_plan(i[0], 8), r"top_k_index must have 2 dimensions, got shape \[2\]"),
        (lambda i: build_plan(i[:, :0], 8), "k of at least 1, got k = 0"),
        (lambda i: build_plan(i, 0), "num_experts must be at least 1, got 0"),
        (lambda i: build_plan(i, 8, alignment=0), "alignment must be at least 1, got 0"),
        (lambda i: build_plan(i, 8, "masked", max_m=1), "max_m must be at least T = 2.*got 1"),
        (lambda i: build_plan(i, 8, max_m=4), "max_m is for 'masked' only, got 4"),
        (lambda i: build_plan(i, 8, "masked", alignment=4), "alignment is for 'contiguous' only"),
        (
            lambda i: dispatch(torch.ones(2, 4, device="meta"), build_plan(i, 8)),
            "x on meta, plan on",
        ),
        (
            lambda i: combine(torch.ones(4, 4), build_plan(i, 8), torch.ones(2, 2).int()),
            "combine: top_k_weights must be .* got int32",
        ),
        (lambda i: build_plan(i, 8, "ragged"), "must be 'contiguous' or 'masked', got 'ragged'"),
        (
            lambda i: dispatch(torch.ones(3, 4), build_plan(i, 8)),
            r"x must be \[T = 2, ...\], got \[3, 4\]",
        ),
        (
            lambda i: combine(torch.ones(3, 4), build_plan(i, 8), torch.ones(2, 2)),
            r"= \[4, 4\], got \[3, 4\]",
        ),
        (
            lambda i: combine(torch.ones(4, 4), build_plan(i, 8), torch.ones(2, 3)),
            r"\[T, k\] = \[2, 2\], got",
        ),
    ],
)
def test_bad_plans_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(torch.tensor([[0, 1], [2, 3]]))
