"""The router's choice: the same in plain Python and in PyTorch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.gradcheck import GradcheckError

from moefp8 import TopKRouter
from moefp8.routing import sigmoid_group_topk, softmax_topk
from moefp8.routing.top_k import _sigmoid, sigmoid_grad, softmax_grad
from tests import naive
from tests.routing.top_k_cases import DTYPES, INF, NAN, OPS, samples

ODD = st.sampled_from((NAN, INF, -INF, 0.0, -0.0, 1.0, 1.5, 1e-40, 3e38))  # ties are common


@given(
    data=st.data(),
    value=st.sampled_from((ODD, st.floats(-20, 20, width=32))),
    dtype=st.sampled_from(DTYPES),
    renormalize=st.booleans(),
    factor=st.sampled_from((1.0, 2.5)),
)
def test_choices_equal_plain_python(data, value, dtype, renormalize, factor):
    num_groups, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    num_experts, topk_groups = num_groups * size, data.draw(st.integers(1, num_groups))
    k = data.draw(st.integers(1, topk_groups * size))
    drawn = st.lists(value, min_size=num_experts, max_size=num_experts)
    logits, bias = torch.tensor([data.draw(drawn)]).to(dtype), torch.tensor(data.draw(drawn))
    ours = softmax_topk(logits, k, renormalize)
    assert_close_choice(ours, *naive.softmax_topk(logits[0].tolist(), k, renormalize))
    ours = sigmoid_group_topk(logits, bias, k, num_groups, topk_groups, renormalize, factor)
    scores = logits[0].double().sigmoid().float()
    index = naive.group_choice((scores + bias).tolist(), k, num_groups, topk_groups)
    expected = scores[index] * factor  # the bias does not change them
    total = scores[index].sum() + 1e-20 if renormalize else 1.0
    assert_close_choice(ours, index, expected / total)


def assert_close_choice(ours, index, weights) -> None:
    """Compare the choice of a single token."""
    assert ours.top_k_index[0].tolist() == index
    expected = torch.as_tensor(weights, dtype=torch.float32)
    torch.testing.assert_close(
        ours.top_k_weights[0], expected, rtol=1e-5, atol=1e-7, equal_nan=True
    )


def test_sigmoid_group_topk_at_deepseek_size():
    logits, bias = torch.randn(50, 256), torch.randn(256) * 0.1
    for token in logits:
        ours = sigmoid_group_topk(token[None], bias, 8, 8, 4, True, 2.5)
        arguments = (token.tolist(), bias.tolist(), 8, 8, 4, True, 2.5)
        assert_close_choice(ours, *naive.sigmoid_group_topk(*arguments))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: softmax_topk(x, 9, True), r"softmax_topk: top_k .* \[1, E\] = \[1, 8\], got 9"),
        (lambda x: softmax_topk(x, 0, True), "got 0"),
        (lambda x: softmax_topk(x[0], 2, True), r"logits must be \[T, E\], got shape \[8\]"),
        (lambda x: sigmoid_group_topk(x, None, 2, 3), "num_groups must divide E = 8, got 3"),
        (lambda x: sigmoid_group_topk(x, None, 2, 4, 5), r"topk_groups must be in .*got 5"),
        (lambda x: sigmoid_group_topk(x, None, 3, 4, 1), "the 2 experts of 1 groups, got 3"),
        (lambda x: sigmoid_group_topk(x, x[0, :3], 2), r"bias must be \[E\] = \[8\], got \[3\]"),
    ],
)
def test_bad_choices_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4, 8))


def test_experts_of_closed_groups_follow_when_only_minus_infinity_is_left():
    bias = torch.tensor([0.0, 0.0, 5.0, -INF])
    index, _ = sigmoid_group_topk(torch.zeros(1, 4), bias, 2, 2, 1)
    assert index.tolist() == [[0, 1]]  # 5 - Inf is no strong group
    bias[2:] = torch.tensor([-INF, 5.0])
    index, _ = sigmoid_group_topk(torch.zeros(1, 4), -bias.abs(), 2, 2, 1)
    assert index.tolist() == [[0, 1]]
    index, _ = sigmoid_group_topk(torch.zeros(1, 4), torch.full((4,), -INF), 2, 2, 1)
    assert index.tolist() == [[0, 1]]


def test_sigmoid_is_rounded_correctly():
    x = samples()
    ours, e = _sigmoid(x), x.double().exp()
    exact = torch.where(x < 0, e / (1 + e), 1 / (1 + 1 / e))
    exponent = torch.frexp(exact).exponent.clamp(min=-125)
    errors = (ours.double() - exact).abs() / torch.exp2(exponent.double() - 24)
    assert errors[~x.isnan()].max() < 0.5001
    assert torch.equal(ours.isnan(), x.isnan())
    assert ours[(ours > 0) & (ours < 2**-126)].numel() > 10_000  # denormal ones are among them


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_are_those_of_the_formulas(renormalize):
    logits = torch.randn(5, 16, requires_grad=True)
    index, weights = softmax_topk(logits, 4, renormalize)
    expected = logits.softmax(dim=-1).gather(1, index)
    sigmoid_index, sigmoid_weights = sigmoid_group_topk(logits, None, 4, 4, 2, renormalize, 2.5)
    sigmoids = logits.sigmoid().gather(1, sigmoid_index)
    if renormalize:
        expected, sigmoids = (x / x.sum(dim=-1, keepdim=True) for x in (expected, sigmoids))
    for ours, formula in ((weights, expected), (sigmoid_weights, 2.5 * sigmoids)):
        grad = torch.randn_like(ours)
        pairs = (torch.autograd.grad(x, logits, grad)[0] for x in (ours, formula))
        torch.testing.assert_close(*pairs, rtol=1e-5, atol=1e-6)


class Formula(torch.autograd.Function):
    """top_k_weights in FP64; their gradient is that of moefp8, and `wrong` times too large."""

    @staticmethod
    def forward(ctx, logits, index, scoring, renormalize, wrong):
        ctx.save_for_backward(logits, index)
        ctx.rest = scoring, renormalize, wrong
        chosen = SCORES[scoring](logits).gather(1, index)
        return chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen

    @staticmethod
    def backward(ctx, grad):
        (logits, index), (scoring, renormalize, wrong) = ctx.saved_tensors, ctx.rest
        given = grad.float(), logits.float(), index, renormalize
        found = softmax_grad(*given) if scoring == "softmax" else sigmoid_grad(*given, wrong)
        return found.double() * (wrong if scoring == "softmax" else 1), None, None, None, None


SCORES = {"softmax": lambda logits: logits.softmax(-1), "sigmoid": torch.sigmoid}


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", SCORES)
def test_gradients_are_those_of_finite_differences(scoring, renormalize):
    logits = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    given = logits, logits.topk(3).indices, scoring, renormalize
    assert torch.autograd.gradcheck(Formula.apply, (*given, 1.0))
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(Formula.apply, (*given, 1.01))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_compiled_router_is_bit_equal(scoring):
    torch._dynamo.reset()
    rest = {"num_groups": 4, "topk_groups": 2, "correction_bias": True}
    router = TopKRouter(32, 16, 4, scoring=scoring, **(rest if scoring == "sigmoid" else {}))
    compiled, x = torch.compile(router, fullgraph=True), torch.randn(7, 32)
    ours, expected = compiled(x), router(x)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    (ours_grad,), (grad,) = (
        torch.autograd.grad(y.top_k_weights.square().sum(), router.weight) for y in (ours, expected)
    )
    torch.testing.assert_close(ours_grad, grad)


@pytest.mark.parametrize("op", OPS)
def test_ops_keep_the_rules_of_torch(op):
    arguments = (4, True) if op == "softmax_topk" else (None, 4, 4, 2, True, 2.5)
    function = getattr(torch.ops.moefp8, op).default
    for logits in (torch.randn(6, 16), torch.randn(16, 6).T.bfloat16(), torch.randn(0, 16)):
        torch.library.opcheck(function, (logits, *arguments))
