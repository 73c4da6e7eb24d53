"""Router, plans, dispatch and combine with numbers of every bit pattern: see `test_ops.py`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.kernels import num_blocks
from moefp8.routing import (
    RoutingPlan,
    build_plan,
    combine,
    dispatch,
    sigmoid_group_topk,
    softmax_topk,
)
from moefp8.routing.route import route
from moefp8.routing.top_k import top_k_backward
from tests import naive
from tests.fuzz import cases as fuzz
from tests.fuzz import layers as fuzz_layers
from tests.fuzz.layers import known_to_cpu
from tests.gpu import on_cpu_and_gpu, on_gpu, same_bits
from tests.routing.cases import (
    check_dispatch,
    expected_combine,
    plan_of,
    run_combine,
    run_dispatch,
)

pytestmark = pytest.mark.filterwarnings("error:.*portable PyTorch body")
EXPERTS, TOKENS = fuzz.size(30, 300, 1), fuzz.size(40, 600)
LAYOUTS = st.sampled_from(((1, None), (4, None), (128, None), (1, 0), (1, 3)))


def build(ids: torch.Tensor, num_experts: int, layout: tuple[int, int | None]) -> RoutingPlan:
    """`layout` is the alignment, and how many rows each expert has beyond T."""
    alignment, spare = layout
    if ids.device.type == "cpu":
        ids = known_to_cpu(ids, num_experts)
    if spare is None:
        return build_plan(ids, num_experts, alignment=alignment)
    return build_plan(ids, num_experts, "masked", max_m=len(ids) + spare)


@on_cpu_and_gpu
@given(choices=fuzz_layers.choices(40), num_tokens=TOKENS, num_experts=EXPERTS, layout=LAYOUTS)
def test_plan(device, choices, num_tokens, num_experts, layout):
    plan = build(choices.make_ids(num_tokens, num_experts, device), num_experts, layout)
    ids = known_to_cpu(choices.make_ids(num_tokens, num_experts, "cpu"), num_experts)
    if device != "cpu":
        expected = build(ids, num_experts, layout)
        for name in RoutingPlan.__annotations__:
            ours, theirs = getattr(plan, name), getattr(expected, name)
            assert ours == theirs if name == "max_m" else torch.equal(ours.cpu(), theirs), name
        return
    num_rows = len(plan.row_to_token)
    maps = naive.plan(ids.tolist(), num_experts, layout[0], plan.max_m, num_rows)
    ours = plan.tokens_per_expert, plan.expert_offsets, plan.row_to_token, plan.row_to_expert
    assert [x.tolist() for x in (*ours, plan.token_to_row)] == maps


@on_cpu_and_gpu
@given(
    x=fuzz.matrices(),
    choices=fuzz_layers.choices(),
    num_experts=fuzz.size(9, 40, 1),
    layout=LAYOUTS,
)
def test_dispatch_and_combine(device, x, choices, num_experts, layout):
    x = x._replace(shape=x.shape[-2:])
    num_tokens, _ = x.shape
    tokens = x.make(device)
    plan = build(choices.make_ids(num_tokens, num_experts, device), num_experts, layout)
    weights = choices.make_weights(num_tokens, device)
    moved = dispatch(tokens, plan)
    expected = torch.zeros(len(plan.row_to_token), x.shape[1], dtype=x.dtype)
    for row, token in enumerate(plan.row_to_token.tolist()):
        if token >= 0:
            expected[row] = tokens[token].cpu()
    assert same_bits(moved.flatten(0, -2), expected)
    spoilt = expected.masked_fill((plan.row_to_token < 0).cpu()[:, None], torch.nan)
    summed = naive.combine(spoilt, plan.token_to_row.tolist(), weights.cpu())
    ours = combine(spoilt.to(device).view(moved.shape), plan, weights)
    assert same_bits(ours, summed)


@on_gpu
@given(
    x=fuzz.matrices(),
    choices=fuzz_layers.choices(40),
    num_experts=EXPERTS,
    masked=st.booleans(),
    kinds=st.tuples(st.sampled_from(fuzz.CODES), st.sampled_from(fuzz.SCALES)),
    scale_place=fuzz.place_in(fuzz.SCALE_PLACES),
)
def test_the_kernels_of_layers(x, choices, num_experts, masked, kinds, scale_place):
    """Layers quantize what they dispatch, unless it comes as codes, and sum rows of BF16."""
    num_tokens, hidden_size = x.shape[-2:]
    if num_tokens * hidden_size == 0 or num_tokens * num_experts > 2**16:
        return
    tokens = x._replace(shape=x.shape[-2:]).make("cuda")
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    ids = choices.make_ids(num_tokens, num_experts, "cuda")
    max_m = num_tokens + choices.seed % 3 if masked else None
    done = run_dispatch(tokens, ids, num_experts, max_m)
    check_dispatch(done, tokens, ids, num_experts, max_m)
    codes = fuzz.codes(kinds[0], num_tokens, hidden_size).cuda()
    if x.place in fuzz.OPERAND_PLACES:
        codes = fuzz.placed(fuzz.OPERAND_PLACES, x.place, codes)
    scales = fuzz.scales(kinds[1], num_tokens, num_blocks(hidden_size)).cuda()
    scales = fuzz.placed(fuzz.SCALE_PLACES, scale_place, scales)
    done = run_dispatch(codes, ids, num_experts, max_m, x_scale_inv=scales)
    check_dispatch(done, codes, ids, num_experts, max_m, x_scale_inv=scales)
    plan, weights = plan_of(ids, num_experts, max_m), choices.make_weights(num_tokens, "cuda")
    y = fuzz.floats(x.kind, torch.bfloat16, len(plan.row_to_token), (hidden_size + 15) // 8 * 8)
    y[plan.row_to_token < 0] = torch.nan
    ours = run_combine(y.cuda(), hidden_size, plan, weights)
    assert same_bits(ours, expected_combine(y, hidden_size, plan, weights))
    addend = fuzz.floats(x.kind, torch.bfloat16, num_tokens, hidden_size).cuda()
    added = run_combine(y.cuda(), hidden_size, plan, weights, addend=addend)
    assert same_bits(added, expected_combine(y, hidden_size, plan, weights, addend))


# ---- The router ----


@on_cpu_and_gpu
@given(case=fuzz_layers.routers())
def test_softmax_topk(device, case):
    logits = case.logits.make("cpu")
    index, weights = softmax_topk(case.logits.make(device), case.k, case.renormalize)
    if device == "cpu":
        pairs = [naive.softmax_topk(x, case.k, case.renormalize) for x in logits.tolist()]
        assert index.tolist() == [chosen for chosen, _ in pairs]
        # Differences of logits are rounded to FP32: up to 104 * 2^-24 of an exponential.
        expected = torch.tensor([x for _, x in pairs]).view(index.shape)
        tolerance = 2.0**-16
    else:
        expected_index, expected = softmax_topk(logits, case.k, case.renormalize)
        assert torch.equal(index.cpu(), expected_index)
        tolerance = 2.0**-19
    torch.testing.assert_close(
        weights.cpu(), expected, rtol=tolerance, atol=2.0**-144, equal_nan=True
    )


@on_cpu_and_gpu
@given(case=fuzz_layers.routers())
def test_sigmoid_group_topk(device, case):
    def make(place: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = None if case.bias is None else case.bias.make(place)[0]
        return case.logits.make(place), bias

    index, weights = sigmoid_group_topk(*make(device), *case.rest)
    logits, bias = make("cpu")
    if device != "cpu":
        expected_index, expected = sigmoid_group_topk(logits, bias, *case.rest)
        assert torch.equal(index.cpu(), expected_index)
        assert same_bits(weights, expected)
        return
    scores, exact = scores_of(logits), logits.double().sigmoid().float()
    torch.testing.assert_close(scores, exact, rtol=2.0**-23, atol=2.0**-149, equal_nan=True)
    biased = scores if bias is None else scores + bias.float()
    k, *groups = case.rest[:3]
    assert index.tolist() == [naive.group_choice(x, k, *groups) for x in biased.tolist()]
    chosen = scores.gather(1, index).double()
    if case.renormalize:
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
    expected = (chosen * case.factor).float()
    of_denormals = 2.0**-148 * max(1.0, abs(case.factor))
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=of_denormals, equal_nan=True)


@on_cpu_and_gpu
@given(case=fuzz_layers.routers(), by_sigmoid=st.booleans())
def test_the_gradient_of_a_choice(device, case, by_sigmoid):
    """Against autograd in FP64, as a share of what comes."""
    logits = case.logits.make("cpu")
    index, _ = softmax_topk(logits, case.k, False)
    grad, factor = torch.randn(index.shape), 2.5 if by_sigmoid else 1.0
    exact = logits.double().requires_grad_()
    scores = exact.sigmoid() if by_sigmoid else exact.softmax(-1)
    weights = scores.gather(1, index)
    if case.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    (expected,) = torch.autograd.grad(factor * weights, exact, grad.double())
    inputs = grad.to(device), case.logits.make(device), index.to(device), by_sigmoid
    ours = top_k_backward(*inputs, case.renormalize, factor).cpu()
    assert (ours.shape, ours.dtype) == (logits.shape, logits.dtype)
    known = logits.float().isfinite().all(1) & (weights.sum(-1) > 1e-15)
    errors = (ours.double() - expected).abs() / (factor * grad.norm(dim=1, keepdim=True).double())
    most = 4 * max(torch.finfo(logits.dtype).eps, 2.0**-23)
    assert (errors[known] <= most).all()


def scores_of(logits: torch.Tensor) -> torch.Tensor:
    """All sigmoids of FP32 as the op has them, with the order of experts undone."""
    index, weights = sigmoid_group_topk(logits, None, logits.shape[1], renormalize=False)
    return torch.empty_like(weights).scatter_(1, index, weights)


@on_cpu_and_gpu
@given(case=fuzz_layers.routes())
def test_route(device, case):
    """What a token chooses has the largest logits, and is its own whatever else is computed."""
    x, weight, bias = case.make(device)
    index, weights = route(x, weight, bias, *case.rest)
    k, num_experts = case.router.k, len(weight)
    assert index.shape == weights.shape == (len(x), k)
    assert index.sort(1).values.diff(dim=1).gt(0).all()
    assert ((index >= 0) & (index < num_experts)).all()
    if device != "cpu" and x.dtype == torch.bfloat16:
        some = torch.arange(len(x), device=device)[len(x) // 3 :].flip(0)
        bias = None if bias is None else bias.contiguous()
        alone = route(x[some].contiguous(), weight.contiguous(), bias, *case.rest)
        assert torch.equal(alone[0], index[some])
        assert same_bits(alone[1], weights[some].cpu())
    if case.router.num_groups > 1 and case.by_sigmoid:
        return  # the choice among groups is followed by `test_sigmoid_group_topk`
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    # Parts of an FP32 number below 2^-133 may be lost, and denormal products.
    errors = 1e-6 * sizes + 2.0**-120 * (1 + x.double().abs().sum(1, keepdim=True))
    scores = exact
    if case.by_sigmoid:
        scores, errors = exact.sigmoid(), errors / 4 + 2.0**-22
        if bias is not None:
            scores, errors = scores + bias.double(), errors + 2.0**-22 * bias.double().abs()
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, index, True)
    least = (scores + errors).masked_fill(~is_chosen, torch.inf).amin(1)
    others = (scores - errors).masked_fill(is_chosen, -torch.inf).amax(1)
    known = (sizes < 1e37).all(1) & scores.isfinite().all(1)
    assert (least >= others)[known].all()
