"""SwiGLU and its gradient, as formulas."""

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from moefp8.functional.activation import activate, activate_grad
from tests import naive

NAN, INF = float("nan"), float("inf")


class Formula(torch.autograd.Function):
    """SwiGLU in FP64, with the gradient of moefp8, which is `wrong` times too large."""

    @staticmethod
    def forward(ctx, gate, up, limit, wrong):
        ctx.save_for_backward(gate, up)
        ctx.limit, ctx.wrong = limit, wrong
        return naive.activate(gate, up, limit)

    @staticmethod
    def backward(ctx, grad):
        of_gate, of_up, activated = activate_grad(grad, *ctx.saved_tensors, ctx.limit)
        assert torch.allclose(activated, naive.activate(*ctx.saved_tensors, ctx.limit))
        return ctx.wrong * of_gate, of_up, None, None


@pytest.mark.parametrize("limit", [None, 0.5, 2.0])
def test_the_gradient_is_that_of_finite_differences(limit):
    gate, up = (3 * torch.randn(2, 60, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(Formula.apply, (gate, up, limit, 1.0))
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(Formula.apply, (gate, up, limit, 1.01))


@pytest.mark.parametrize("limit", [None, 0.5])
def test_the_gradient_is_that_of_the_forward(limit):
    """In FP32 too, and for gates so large that a power of them would overflow."""
    gate, up, grad = 3 * torch.randn(3, 200)
    gate[:6] = torch.tensor([-1e30, -200.0, -88.0, 88.0, 200.0, 1e30])
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    y = activate(*leaves, limit)
    expected = torch.autograd.grad(y, leaves, grad)
    found = activate_grad(grad, gate, up, limit)
    torch.testing.assert_close(found, (*expected, y.detach()), rtol=1e-5, atol=1e-6)


def test_where_the_limit_holds_there_is_none():
    gate = torch.tensor([1.5, 2.0, 2.5, -9.0, 1.0, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.5, -2.5, -2.0])
    of_gate, of_up, _ = activate_grad(torch.ones(7), gate, up, 2.0)
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
def test_exact_values_do_not_depend_on_where_the_tensor_ends(size):
    """PyTorch's vector code computes silu otherwise than the code that takes the last elements."""
    torch.manual_seed(0)
    gate, up = torch.randn(600, size) * 4, torch.randn(600, size)
    whole = activate(gate, up, 3.0, exact=True)
    for num in (*range(1, 40), 599):
        assert torch.equal(activate(gate[:num], up[:num], 3.0, exact=True), whole[:num])
    assert torch.allclose(whole, activate(gate, up, 3.0), rtol=1e-6, atol=0)
