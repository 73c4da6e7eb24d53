"""Plans against plain Python; dispatch and combine token by token."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.routing import build_plan, combine, dispatch
from moefp8.testing import routings
from tests import naive
from tests.fakes.emulator import emulated
from tests.gpu import on_cpu_and_gpu, same_bits

THREE_IDS = st.lists(st.integers(0, 3), min_size=3, max_size=3)  # 3 is of no expert
both_layouts = pytest.mark.parametrize("layout", ["contiguous", "masked"])


@given(
    ids=st.lists(THREE_IDS, max_size=12),
    dtype=st.sampled_from((torch.int32, torch.int64)),
    alignment=st.sampled_from((1, 4, 128)),
    spare=st.sampled_from((None, 0, 3)),
)
@both_layouts
def test_plan_equals_plain_python(ids, dtype, layout, alignment, spare):
    """Where a token names an expert twice, it has one row there."""
    index, max_m = torch.tensor(ids, dtype=dtype).view(-1, 3), None
    if layout == "masked":
        alignment, max_m = 1, len(ids) + (spare or 0)
        plan = build_plan(index, 3, layout, max_m=None if spare is None else max_m)
    else:
        plan = build_plan(index, 3, alignment=alignment)
    num_rows = len(plan.row_to_token)
    *maps, rows_of_expert = vars(plan).values()
    assert [x.tolist() for x in maps] == naive.plan(ids, 3, alignment, max_m, num_rows)
    assert {x.dtype for x in maps} == {torch.int32}
    assert (plan.layout, rows_of_expert) == (layout, max_m)


@given(
    ids=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), max_size=12),
    num_experts=st.integers(1, 4),
    expert_offset=st.integers(0, 5),
)
@both_layouts
def test_a_rank_plans_for_its_own_experts(ids, num_experts, expert_offset, layout):
    """9 is of no expert of the whole model."""
    index = torch.tensor(ids, dtype=torch.int64).view(-1, 2)
    rank = {"expert_offset": expert_offset, "num_global_experts": 9}
    plan = build_plan(index, num_experts, layout, **rank)
    own = range(expert_offset, expert_offset + num_experts)
    here = [[x - expert_offset if x in own else num_experts for x in token] for token in ids]
    *maps, rows_of_expert = vars(plan).values()
    of_plan = num_experts, 1, rows_of_expert, len(plan.row_to_token)
    assert [x.tolist() for x in maps] == naive.plan(here, *of_plan)


def test_the_number_of_rows_does_not_depend_on_the_routing():
    even = torch.arange(32).view(16, 2) % 8
    one = torch.tensor([[5, 6]]).expand(16, 2)
    for arguments in ({}, {"alignment": 16}, {"layout": "masked"}):
        shapes = {tuple(build_plan(x, 8, **arguments).row_shape) for x in (even, one)}
        assert len(shapes) == 1


def test_the_plan_is_frozen():
    plan = build_plan(torch.tensor([[0, 2], [2, 1]]), 3, alignment=128)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.max_m = 3


@given(routing=routings(6, 3, max_tokens=15), seed=st.integers(0, 99))
@both_layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_dispatch_and_combine(routing, seed, layout, dtype):
    """What padding and the top_k_weights of choices held elsewhere are does not come through."""
    torch.manual_seed(seed)
    index, weights = routing
    x, plan = torch.randn(len(index), 9).to(dtype), build_plan(index, 6, layout)
    rows = dispatch(x, plan)
    assert (rows.shape, rows.dtype) == ((*plan.row_shape, 9), dtype)
    flat, expected = rows.flatten(0, -2).float(), x.float()
    for row, token in enumerate(plan.row_to_token.tolist()):
        assert torch.equal(flat[row], expected[token] if token >= 0 else torch.zeros(9))
    y = torch.randn_like(flat).bfloat16()
    y[plan.row_to_token < 0] = torch.nan
    result = combine(y.view(*plan.row_shape, 9), plan, weights.masked_fill(index == 6, torch.nan))
    assert same_bits(result, naive.combine(y, plan.token_to_row.tolist(), weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_without_tokens_are_zeros(dtype):
    plan = build_plan(torch.zeros(0, 2, dtype=torch.int64), 3, "masked", max_m=40)
    for _ in range(20):
        held = torch.full((3, 40, 64), 7.0).to(dtype)  # its memory is free again right away
        del held
        rows = dispatch(torch.zeros(0, 64).to(dtype), plan)
        assert rows.shape == (3, 40, 64)
        assert not rows.float().any()


@on_cpu_and_gpu
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("shape", [(9, 24), (9,), (9, 3, 8), (0, 24)])
def test_the_gradient_of_dispatch_is_rounded_once(layout, shape, device):
    """The rows of a token are summed in FP32 and in the order of its choices."""
    index = torch.stack([torch.randperm(16)[:8] for _ in range(shape[0])] or [torch.empty(8)])
    index = index[: shape[0]].long().to(device)
    plan = build_plan(index, 16, layout)
    x = torch.randn(shape, device=device).bfloat16().requires_grad_()
    grad = torch.randn(*plan.row_shape, *shape[1:], device=device).bfloat16()
    dispatch(x, plan).backward(grad)
    rows, total = grad.flatten(0, len(plan.row_shape) - 1).float(), torch.zeros_like(x).float()
    for choice in range(8):
        total = total + rows[plan.token_to_row[:, choice].long()]
    assert torch.equal(x.grad, total.bfloat16())


def test_dispatch_is_differentiated_twice():
    plan = build_plan(torch.tensor([[0, 2], [1, 1], [3, 4]]), 4)
    x, w = torch.randn(3, 5).requires_grad_(), torch.randn(6, 5).requires_grad_()
    (of_x,) = torch.autograd.grad((dispatch(x, plan) * w).sum(), x, create_graph=True)
    of_x.square().sum().backward()
    rows = plan.token_to_row.long()
    expected = torch.zeros(6, 5)
    for token, own in enumerate(rows.tolist()):
        for row in {row for row in own if row >= 0}:
            expected[row] = 2 * of_x.detach()[token]
    torch.testing.assert_close(w.grad, expected)


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
    """They see it also where a kernel would combine, which sees neither of them."""
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


def moved(index: torch.Tensor, *shape: int, device: str = "cpu") -> torch.Tensor:
    return dispatch(torch.ones(shape, device=device), build_plan(index, 8))


def summed(index: torch.Tensor, num_rows: int, weights: torch.Tensor) -> torch.Tensor:
    return combine(torch.ones(num_rows, 4), build_plan(index, 8), weights)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: build_plan(i + 7, 8), r"in \[0, E\] for E = 8 .*got ids from 7 to 10"),
        (lambda i: build_plan(i - 1, 8), "got ids from -1 to 2"),
        (lambda i: build_plan(i.float(), 8), "top_k_index must be int32 or int64, got float32"),
        (lambda i: build_plan(i[0], 8), r"top_k_index must have 2 dimensions, got shape \[2\]"),
        (lambda i: build_plan(i[:, :0], 8), "k of at least 1, got k = 0"),
        (lambda i: build_plan(i + 6, 4, num_global_experts=8), r"in \[0, E\] for E = 8 .* 6 to 9"),
        (lambda i: build_plan(i, 4, expert_offset=1), "of 4 in the whole model, got 1"),
        (
            lambda i: build_plan(i, 4, expert_offset=-1, num_global_experts=8),
            r"expert_offset must be in \[0, num_global_experts - E\] for E = 4 .* of 8 .* got -1",
        ),
        (lambda i: build_plan(i, 4, num_global_experts=3), "of 3 in the whole model, got 0"),
        (lambda i: build_plan(i, 0), "num_experts must be at least 1, got 0"),
        (lambda i: build_plan(i, 8, alignment=0), "alignment must be at least 1, got 0"),
        (lambda i: build_plan(i, 8, "masked", max_m=1), "max_m must be at least T = 2.*got 1"),
        (lambda i: build_plan(i, 8, max_m=4), "max_m is for 'masked' only, got 4"),
        (lambda i: build_plan(i, 8, "masked", alignment=4), "alignment is for 'contiguous' only"),
        (lambda i: build_plan(i, 8, "ragged"), "must be 'contiguous' or 'masked', got 'ragged'"),
        (lambda i: moved(i, 2, 4, device="meta"), "x on meta, plan on"),
        (lambda i: moved(i, 3, 4), r"x must be \[T = 2, ...\], got \[3, 4\]"),
        (lambda i: summed(i, 4, i.int()), "combine: top_k_weights must be .* got int32"),
        (lambda i: summed(i, 3, torch.ones(2, 2)), r"= \[4, 4\], got \[3, 4\]"),
        (lambda i: summed(i, 4, torch.ones(2, 3)), r"\[T, k\] = \[2, 2\], got"),
    ],
)
def test_bad_plans_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(torch.tensor([[0, 1], [2, 3]]))
