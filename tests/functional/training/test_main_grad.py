"""Where the gradient of a weight goes, by Megatron-LM's convention."""

import pytest
import torch
from torch import nn

from moefp8.functional.training import main_grad


class Product(torch.autograd.Function):
    """x W^T, whose gradient in W goes where `main_grad` says."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        d, accumulates = main_grad.target(weight)
        made = dy.T @ x
        d.add_(made) if accumulates else d.copy_(made)
        return None, main_grad.result(weight, d)


def make_weight(**attributes: object) -> nn.Parameter:
    weight = nn.Parameter(torch.randn(6, 4).bfloat16())
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


def backward(weight: nn.Parameter) -> torch.Tensor:
    """The gradient that autograd would give."""
    x = torch.randn(5, 4).bfloat16()
    Product.apply(x, weight).sum().backward()
    return (torch.ones(5, 6).bfloat16().T @ x).float()


def test_without_main_grad_there_is_a_gradient():
    weight = make_weight(grad_added_to_main_grad=False)
    expected = backward(weight)
    assert weight.grad.dtype == weight.dtype
    assert torch.equal(weight.grad.float(), expected)
    assert weight.grad_added_to_main_grad is False
    expected = expected.bfloat16() + backward(weight).bfloat16()
    assert torch.equal(weight.grad, expected)
    d, accumulates = main_grad.target(make_weight(main_grad=None).T)
    assert (d.shape, d.is_contiguous(), accumulates) == ((4, 6), True, False)


def test_micro_batches_add_up_in_main_grad():
    weight = make_weight(main_grad=torch.ones(6, 4))
    expected = weight.main_grad.clone()
    for _ in range(3):
        expected += backward(weight)
        assert torch.equal(weight.main_grad, expected)
    assert weight.grad is None
    assert not hasattr(weight, "grad_added_to_main_grad")


def test_main_grad_may_be_overwritten():
    weight = make_weight(main_grad=torch.full((6, 4), torch.nan), overwrite_main_grad=True)
    assert torch.equal(backward(weight), weight.main_grad)


@pytest.mark.parametrize("zeros", [None, False, True])
def test_hooks_run_with_a_gradient_that_means_nothing(zeros):
    weight = make_weight(main_grad=torch.zeros(6, 4), grad_added_to_main_grad=False)
    if zeros is not None:
        weight.zero_out_wgrad = zeros
    seen = []
    weight.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad))
    expected = backward(weight)
    assert weight.grad_added_to_main_grad is True
    assert torch.equal(weight.main_grad, expected)
    (dummy,) = seen
    assert (dummy.shape, dummy.dtype) == (weight.shape, weight.dtype)
    assert dummy.data_ptr() != weight.main_grad.data_ptr()
    if zeros:
        assert not dummy.any()


def test_bad_main_grads_are_named():
    with pytest.raises(TypeError, match="main_grad must be float32, got bfloat16"):
        main_grad.target(make_weight(main_grad=torch.zeros(6, 4).bfloat16()))
    with pytest.raises(TypeError, match="main_grad must be a tensor, got int"):
        main_grad.target(make_weight(main_grad=3))
    with pytest.raises(ValueError, match=r"the shape of its weight = \[6, 4\], got \[4, 6\]"):
        main_grad.target(make_weight(main_grad=torch.zeros(4, 6)))
    with pytest.raises(ValueError, match="main_grad must be contiguous"):
        main_grad.target(make_weight(main_grad=torch.zeros(4, 6).T))
    with pytest.raises(ValueError, match="main_grad on meta"):
        main_grad.target(make_weight(main_grad=torch.zeros(6, 4, device="meta")))
