"""The kit for gradients: what its references give, and what `gradients` must notice."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moefp8 import FP8Linear, GroupedExperts, MoE
from moefp8.testing import (
    assert_matches_reference,
    gemm_shapes,
    gradients,
    reference_model,
    relative_error,
    routings,
    sizes,
    spread,
)
from tests import naive
from tests.functional.cases import inputs, tokens_of
from tests.gpu import on_cpu_and_gpu
from tests.layers.cases import assert_close
from tests.layers.gradient_cases import (
    E,
    H,
    I,
    K,
    assert_gradients_right,
    differentiated,
    expected_of,
    experts_of,
    flat,
    gradient_of,
    on,
)

# ---- References ----


def test_the_reference_of_a_linear_has_the_gradients_of_the_codes():
    linear, grad = FP8Linear(300, 200), gradient_of(7, 200)
    _, of_x = differentiated(reference_model(linear), tokens_of(7, 300), grad=grad)
    expected = naive.through_fp8(grad, linear.weight.detach(), linear.weight_scale_inv)
    assert_matches_reference(of_x, expected)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_the_reference_of_experts_has_the_gradients_of_the_codes(limit):
    layer, grad = experts_of(swiglu_limit=limit), gradient_of(8, H)
    arguments = inputs(8, H, 3, E + 1, "repeated")
    found = differentiated(reference_model(layer), *arguments, grad=grad)
    assert_gradients_right(found, expected_of(layer, *arguments, grad=grad), I)


def test_unquantized_references_have_the_gradients_of_plain_modules():
    layer, linear, x = experts_of(), FP8Linear(H, I), tokens_of(8, H).float()
    _, *choice = inputs(8, H, K, E)
    for module, plain, arguments in (
        (layer, layer.to_plain(torch.float32), (x, *choice)),
        (linear, linear.to_linear(torch.float32), (x,)),
    ):
        ours = gradients(reference_model(module, quantize_activations=False), *arguments)
        expected = gradients(plain, *arguments)
        for name, grad in ours.items():
            assert_matches_reference(flat(grad), flat(expected[name]), 6e-3)


# ---- gradients ----


class Model(nn.Module):
    """It takes tokens and, by name, a shift, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = FP8Linear(H, 40), nn.Linear(40, 8)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, count, *, shift):
        return {"y": self.head(self.linear(x) + shift), "count": count}


def test_names_are_those_of_arguments_and_parameters():
    model, x, shift = Model(), torch.randn(5, H), torch.randn(40)
    found = gradients(model, x, 3, shift=shift, loss=lambda out: out["y"].square().sum())
    assert {*found} == {"0", "shift", "head.weight", "head.bias", "unused"}
    assert not found["unused"].any()
    assert all(found[name].shape == tensor.shape for name, tensor in (("0", x), ("shift", shift)))
    assert not any(y.requires_grad or y.grad is not None for y in (x, shift))
    assert model.head.weight.grad is None


def test_a_reference_has_the_same_names():
    moe, x = MoE(H, I, E, K, shared_intermediate_size=72), tokens_of(5, H)
    moe.shared_experts.up_proj.bias = nn.Parameter(torch.randn(72))
    names = {"0", "gate.weight", "shared_experts.up_proj.bias"}
    assert {*gradients(moe, x)} == {*gradients(reference_model(moe), x)} == names


def test_the_same_seed_gives_the_same():
    linear, x = FP8Linear(H, 40), tokens_of(5, H)
    first, same, other = (gradients(linear, x, seed=seed)["0"] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert relative_error(first, other) > 0.5


class Swapped(torch.autograd.Function):
    """Gradients of the first and the last token are swapped."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([grad[-1:], grad[1:-1], grad[:1]])


WRONG = {
    "swapped": lambda moe: moe.experts.register_forward_hook(lambda *a: Swapped.apply(a[-1])),
    "lost": lambda moe: moe.experts.register_forward_hook(lambda *a: a[-1].detach()),
    "a scale": lambda moe: moe.experts.gate_up_proj_scale_inv[:, 0].mul_(1.5),
    "twice": lambda moe: moe.gate.register_full_backward_hook(lambda _, of_x, __: (2 * of_x[0],)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_gradients_are_noticed(wrong):
    moe, x = MoE(H, I, E, K, renormalize=False), torch.randn(9, H).bfloat16()
    expected = gradients(reference_model(moe), x)
    right = gradients(moe, x)
    for name, grad in right.items():
        assert_matches_reference(grad, expected[name], 0.05)
    WRONG[wrong](moe)
    ours = gradients(moe, x)
    assert any(relative_error(grad, expected[name]) > 0.05 for name, grad in ours.items())


# ---- Properties ----


def product(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss that gives `grad` to y."""
    return (y.float() * grad.float()).sum()


@on_cpu_and_gpu
@settings(max_examples=25)
@given(shape=gemm_shapes(max_m=20), data=spread(), of_y=spread())
def test_linears(shape, data, of_y, device):
    m, n, k = shape
    torch.manual_seed(data.seed)
    linear = FP8Linear(k, n).to(device)
    # In FP32: a gradient in BF16 would round the reference too, and a row may be one number.
    x, grad = data.tensor(m, k).to(device).float(), of_y.tensor(m, n).to(device)
    both = linear, reference_model(linear)
    ours, expected = (gradients(z, x, loss=partial(product, grad))["0"] for z in both)
    # On a GPU sums have some 14 bits: in a row of few numbers most may cancel.
    assert_matches_reference(ours, expected, 4e-3 if device == "cpu" else 2e-2)


@on_cpu_and_gpu
@settings(max_examples=25)
@given(
    routing=routings(E, K, max_tokens=8),
    h=sizes(200, 1),
    i=sizes(200, 1),
    limit=st.sampled_from((None, 0.3)),
    data=spread(8),
    of_y=spread(16),
)
def test_experts(routing, h, i, limit, data, of_y, device):
    layer, num_tokens = GroupedExperts(E, h, i, swiglu_limit=limit).to(device), len(routing[0])
    arguments = on(device, data.tensor(num_tokens, h), *routing)
    grad = of_y.tensor(num_tokens, h).to(device)
    both = layer, reference_model(layer)
    ours, expected = (gradients(z, *arguments, loss=partial(product, grad)) for z in both)
    assert_close(ours["0"], expected["0"], i)
    of_weights = ours["2"], expected["2"]
    # On a GPU sums differ in order: gate or up may be the next BF16 number, dA the next code.
    assert_matches_reference(*map(flat, of_weights), 1e-2 if device == "cpu" else 4e-2)
    assert not of_weights[0][arguments[1] == E].any()


def test_gradients_ask_what_to_differentiate_of_a_model_that_returns_no_tensor():
    class Pair(nn.Linear):
        def forward(self, input):
            return super().forward(input), None

    with pytest.raises(TypeError, match=r"must return a tensor, got tuple; .*loss="):
        gradients(Pair(4, 4), torch.ones(2, 4))
    found = gradients(Pair(4, 4), torch.ones(2, 4), loss=lambda output: output[0].sum())
    assert found.keys() == {"0", "weight", "bias"}
