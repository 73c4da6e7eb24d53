"""Activations and their gradients, as formulas."""

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.nn import functional as F

from moefp8.functional.activation import activate, activate_grad
from moefp8.kernels.common.activation import KINDS, Activation, activation_of
from tests import naive
from tests.functional.activation.cases import ACTIVATIONS

NAN, INF = float("nan"), float("inf")


class Formula(torch.autograd.Function):
    """An activation in FP64, with the gradient of moefp8, which is `wrong` times too large."""

    @staticmethod
    def forward(ctx, gate, up, activation, wrong):
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.wrong = activation, wrong
        return naive.activate(gate, up, activation)

    @staticmethod
    def backward(ctx, grad):
        of_gate, of_up, activated = activate_grad(grad, *ctx.saved_tensors, ctx.activation)
        assert torch.allclose(activated, naive.activate(*ctx.saved_tensors, ctx.activation))
        return ctx.wrong * of_gate, of_up, None, None


@pytest.mark.parametrize("activation", [*ACTIVATIONS, Activation(limit=2.0)])
def test_the_gradient_is_that_of_finite_differences(activation):
    gate, up = (3 * torch.randn(2, 60, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: Formula.apply(*x, activation, 1.0), (gate, up))
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda *x: Formula.apply(*x, activation, 1.01), (gate, up))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_is_that_of_the_forward(activation):
    """In FP32 too, and for gates so large that a power of them would overflow."""
    gate, up, grad = 3 * torch.randn(3, 200)
    large = 1e30 if activation.kind in ("swiglu", "gpt_oss") else 1e12  # PyTorch's GELUs have NaN
    gate[:6] = torch.tensor([-large, -200.0, -88.0, 88.0, 200.0, large])
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    y = activate(*leaves, activation)
    expected = torch.autograd.grad(y, leaves, grad)
    found = activate_grad(grad, gate, up, activation)
    atol = 2e-5 if "geglu" in activation.kind else 1e-6  # PyTorch adds 1 to an erf, or a tanh
    torch.testing.assert_close(found, (*expected, y.detach()), rtol=1e-5, atol=atol)


def test_where_the_limit_holds_there_is_none():
    gate = torch.tensor([1.5, 2.0, 2.5, -9.0, 1.0, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.5, -2.5, -2.0])
    of_gate, of_up, _ = activate_grad(torch.ones(7), gate, up, Activation(limit=2.0))
    assert (of_gate == 0).tolist() == [False, False, True, False, False, False, False]
    assert (of_up == 0).tolist() == [False, False, False, False, True, True, False]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_finite_stays_where_it_is(bad):
    for at in range(3):
        made = list(torch.randn(3, 8))
        made[at][5] = bad
        found = torch.stack(activate_grad(*made))
        assert bool(found[:2, [0, 1, 2, 3, 4, 6, 7]].isfinite().all())
        assert not bool(found[:2, 5].isfinite().all())


@pytest.mark.parametrize("size", [7, 100, 257])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_values_do_not_depend_on_where_the_tensor_ends(kind, size):
    """PyTorch's vector code computes silu otherwise than the code that takes the last elements."""
    torch.manual_seed(0)
    gate, up = torch.randn(600, size) * 4, torch.randn(600, size)
    activation = Activation(kind, 3.0)
    whole = activate(gate, up, activation, exact=True)
    for num in (*range(1, 40), 599):
        assert torch.equal(activate(gate[:num], up[:num], activation, exact=True), whole[:num])
    assert torch.allclose(whole, activate(gate, up, activation), rtol=1e-6, atol=2e-5)


def test_the_names_are_those_of_pytorch():
    gate, up = 5 * torch.randn(2, 1000)
    wanted = {
        "swiglu": F.silu(gate),
        "geglu": F.gelu(gate),
        "geglu_tanh": F.gelu(gate, approximate="tanh"),
    }
    for kind, gated in wanted.items():
        torch.testing.assert_close(activate(gate, up, Activation(kind)), gated * up)
    clamped = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    gpt_oss = clamped[0] * torch.sigmoid(1.702 * clamped[0]) * (clamped[1] + 1)
    torch.testing.assert_close(activate(gate, up, Activation("gpt_oss", 7.0)), gpt_oss)


@pytest.mark.parametrize(
    ("given", "limit", "error", "message"),
    [
        ("relu", None, ValueError, "activation must be one of 'swiglu', 'geglu', .* got 'relu'"),
        (7, None, TypeError, "activation must be a name such as 'swiglu', .* got int"),
        ("geglu", -1.0, ValueError, "swiglu_limit must be at least 0, or None, got -1.0"),
        (Activation(limit=7.0), 6.0, ValueError, "swiglu_limit must be 7.0, as in activation"),
        (Activation("geglu", alpha=2.0), None, ValueError, "alpha belongs to .* got 'geglu'"),
    ],
)
def test_others_are_refused(given, limit, error, message):
    with pytest.raises(error, match=f"^Layer: {message}"):
        activation_of("Layer", given, limit)


def test_a_name_a_whole_and_a_limit_of_its_own_make_one():
    whole = Activation("geglu", 7.0)
    assert whole == activation_of("", "geglu", 7.0) == activation_of("", whole, None)
    assert whole == activation_of("", whole, 7.0)
