"""The gradient of the router: as good as its logits, whatever the dtype, on every device."""

import pytest
import torch

from moefp8 import TopKRouter
from moefp8.routing import logits_launch
from moefp8.routing.logits import exact_logits
from moefp8.routing.route import route
from moefp8.routing.route_backward import RouteBackwardInputs, route_backward
from moefp8.routing.top_k import grad_of_logits
from tests.gpu import no_synchronisation, on_gpu
from tests.routing.test_route import SIGMOID, SOFTMAX, inputs_of, logits_on_gpu
from tests.routing.top_k_cases import Forgets

OP = torch.ops.moefp8.route_backward.default  # what the dispatcher gives, whatever GPU there is
OPTIONS = [SOFTMAX, SIGMOID, (3, False, 1, 1, False, 1.0), (8, True, 1, 1, False, 2.5)]
ROUNDING = 2.0**-9  # of a gradient in BF16


def backward_inputs(x: torch.Tensor, weight: torch.Tensor, options, needs=(True, True)):
    """With a choice of the largest logits, and a random gradient."""
    k, by_sigmoid, *_, renormalize, factor = options
    index = (x.double() @ weight.double().T).topk(k).indices
    grad = torch.randn(len(x), k, device=x.device)
    rest = by_sigmoid, renormalize, factor, *needs
    return RouteBackwardInputs(x, weight, grad, index, *rest)


def assert_right(ours, inputs: RouteBackwardInputs, most_of_x: float, logits=None) -> None:
    """Against products in FP64, by token and by expert; of some experts only rounding is left.

    logits: those of the forward, which are rounded to FP32, and which large ones magnify; None:
        they are exact before.
    """
    x, weight = inputs.x, inputs.weight
    logits = exact_logits(x, weight) if logits is None else logits
    of_logits = grad_of_logits(inputs.with_logits(logits)).double()
    expected = (of_logits @ weight.double()).to(x.dtype), (of_logits.T @ x.double()).float()
    for found, right, most in zip(ours, expected, (most_of_x, 2.0**-15), strict=True):
        assert (found.shape, found.dtype) == (right.shape, right.dtype)
        if right.numel():
            errors, sizes = (y.double().norm(dim=1) for y in (found.double() - right, right))
            assert (errors <= most * sizes.clamp(min=sizes.max() / 100)).all()


# ---- Numerics ----


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_have_gradients(options):
    x, weight, bias = inputs_of(5, 24, 64, torch.float32)
    bias = bias if options[1] else None
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [y.to(dtype).requires_grad_() for y in (x, weight)]
        index, weights = route(x, weight, bias, *options)
        grad = torch.linspace(-1, 1, weights.numel()).view_as(weights)
        if dtype == torch.float32:
            weights = route(*leaves, bias, *options).top_k_weights
        else:
            logits = torch.nn.functional.linear(*leaves)
            scores = logits.sigmoid() if options[1] else logits.softmax(-1)
            weights = options[5] * scores.gather(1, index)
            if options[4]:
                weights = weights / scores.gather(1, index).sum(-1, keepdim=True)
        first = torch.autograd.grad(weights, leaves, grad.to(dtype), create_graph=True)
        again = torch.autograd.grad(sum(y.square().sum() for y in first), leaves)
        found.append([y.float() for y in (*first, *again)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_weights_that_nobody_asks_about_have_no_gradient():
    x, weight, _ = inputs_of(3, 16, 8, torch.float32)
    weights = route(x.requires_grad_(), weight.requires_grad_(), None, *SOFTMAX).top_k_weights
    Forgets.apply(weights).sum().backward()
    assert (x.grad, weight.grad) == (None, None)


def test_only_what_is_wanted_is_computed():
    x, weight, _ = inputs_of(6, 32, 16)
    for needs in ((True, False), (False, True), (False, False)):
        inputs = backward_inputs(x, weight, SOFTMAX, needs)
        shapes = [tuple(y.shape) for y in OP(*inputs)]
        assert shapes == [
            tuple(y.shape) if z else (0,) for y, z in zip((x, weight), needs, strict=True)
        ]


def test_the_op_keeps_the_rules_of_torch():
    for num_tokens in (6, 0):
        x, weight, _ = inputs_of(num_tokens, 16, 64)
        for needs in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(OP, backward_inputs(x, weight, SIGMOID, needs))


def test_a_factor_is_for_sigmoids():
    x, weight, _ = inputs_of(3, 16, 64)
    with pytest.raises(ValueError, match=r"scaling_factor is for by_sigmoid .* got 2\.5"):
        route(x, weight, None, 4, False, 1, 1, True, 2.5)


# ---- The launcher ----


@pytest.mark.parametrize("num_tokens", [1, 133])
@pytest.mark.parametrize(("num_experts", "h"), [(16, 36), (64, 2880), (130, 512)])
@pytest.mark.parametrize("options", OPTIONS)
def test_launch_says_where_everything_lies(gpu, num_tokens, num_experts, h, options):
    x, weight, _ = inputs_of(num_tokens, h, num_experts)
    wide = torch.randn(num_tokens, h + 8).bfloat16()
    for given in (x, wide[:, 8:], wide[:, 1 : h + 1], x.T.contiguous().T):
        gpu.launched.clear()
        inputs = backward_inputs(given, weight, options)
        inputs = inputs._replace(grad=inputs.grad.T.contiguous().T)
        ours = route_backward(*inputs)
        assert [y.kernel.source.stem for y in gpu.launched] == ["logits", "top_k_backward"]
        assert_right(ours, inputs, ROUNDING)


@pytest.mark.parametrize(
    "given",
    [
        lambda x, weight: (x[:, :33], weight[:, :33].contiguous()),
        lambda x, weight: (x, torch.cat((weight, weight), dim=1)[:, 1 : 1 + x.shape[1]]),
        lambda x, weight: (x, weight.T.contiguous().T),
    ],
    ids=["odd", "unaligned weight", "transposed weight"],
)
def test_what_tma_cannot_address_is_copied(gpu, given):
    x, weight, _ = inputs_of(5, 64, 16)
    inputs = backward_inputs(*given(x, weight), SIGMOID)
    index = inputs.top_k_index.T.contiguous().T
    assert_right(route_backward(*inputs._replace(top_k_index=index)), inputs, ROUNDING)
    assert [y.kernel.source.stem for y in gpu.launched] == ["logits", "top_k_backward"]


def test_every_formula_and_number_of_choices_is_prepared_for_itself(gpu):
    x, weight, _ = inputs_of(5, 64, 16)
    for options in (*OPTIONS, (2, *SOFTMAX[1:])):
        inputs = backward_inputs(x, weight, options)
        for _ in range(2):
            assert_right(route_backward(*inputs), inputs, ROUNDING)
    assert len(gpu.prepared()) == len(OPTIONS) + 1


def test_the_op_is_not_differentiable(gpu):
    x, weight, _ = inputs_of(5, 64, 16)
    inputs = backward_inputs(x.requires_grad_(), weight.requires_grad_(), SOFTMAX)
    assert not any(y.requires_grad for y in route_backward(*inputs))
    assert gpu.launched


def test_very_many_tokens_are_split(gpu, monkeypatch):
    x, weight, _ = inputs_of(20, 512, 64)
    inputs = backward_inputs(x, weight, SIGMOID)
    whole = route_backward(*inputs)
    assert len(gpu.launched) == 2
    monkeypatch.setattr(logits_launch, "MAX_SUMS_BYTES", 4 * 64 * 2 * 7)  # seven tokens
    assert all(map(torch.equal, route_backward(*inputs), whole))
    assert len(gpu.launched) == 2 + 2 * 3


def test_what_has_no_kernel_runs_in_pytorch(gpu):
    for dtype, num_tokens, num_experts in (
        (torch.float32, 5, 64),
        (torch.float16, 5, 64),
        (torch.bfloat16, 5, 513),
        (torch.bfloat16, 0, 64),
    ):
        x, weight, _ = inputs_of(num_tokens, 32, num_experts, dtype)
        inputs = backward_inputs(x, weight, SOFTMAX)
        assert_right(route_backward(*inputs), inputs, ROUNDING)
    # The gradient of the choice has one for any dtype.
    assert [y.kernel.source.stem for y in gpu.launched] == ["top_k_backward"] * 2


# ---- On a GPU ----


@on_gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "h"),
    [
        (0, 64, 512),
        (1, 8, 4096),
        (3, 33, 200),
        (300, 130, 2880),
        (2000, 256, 7168),
        (5000, 512, 2048),
    ],
)
def test_it_is_right_on_a_gpu(num_tokens, num_experts, h, options):
    x, weight, _ = inputs_of(num_tokens, h, num_experts, device="cuda")
    x[::3] *= 30
    inputs = backward_inputs(x, weight, options)
    with no_synchronisation(), torch.autocast("cuda", torch.float16):
        ours = route_backward(*inputs)
    logits = logits_on_gpu(x, weight) if num_tokens else None
    assert_right(ours, inputs, ROUNDING, logits)
    assert all(map(torch.equal, ours, route_backward(*inputs)))  # and deterministic


@on_gpu
def test_a_graph_serves_every_step():
    router = TopKRouter(2048, 128, 8, device="cuda")
    x = torch.randn(600, 2048, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(600, 8, device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(router(x).top_k_weights, (x, router.weight), grad)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        grad.normal_()
        with torch.no_grad():
            x.normal_()
        graph.replay()
        assert all(map(torch.equal, captured, step()))
