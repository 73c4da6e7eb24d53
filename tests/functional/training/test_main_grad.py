"""Where the gradient of a weight goes, by Megatron-LM's convention."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moefp8 import FP8Linear, GroupedExperts
from moefp8.functional.training import experts, main_grad


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


# ---- In layers ----

LAYERS = pytest.mark.parametrize("kind", ["linear", "experts"])
WGRADS = pytest.mark.parametrize("wgrad", ["128x1", "bf16"])


def make_layer(kind: str, wgrad: str, **told: object) -> nn.Module:
    torch.manual_seed(0)
    options: Any = {"trainable": True, "wgrad": wgrad}
    layer = (
        FP8Linear(64, 48, **options) if kind == "linear" else GroupedExperts(3, 64, 40, **options)
    )
    for name in layer.master_names:
        weight = layer.get_parameter(name)
        weight.main_grad = torch.zeros(weight.shape)
        for attribute, value in told.items():
            setattr(weight, attribute, value)
    return layer


def main_grads(layer: Any) -> list[torch.Tensor]:
    return [layer.get_parameter(name).main_grad for name in layer.master_names]


def inputs_of(kind: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    x = torch.randn(20, 64).bfloat16().requires_grad_()
    return (x,) if kind == "linear" else (x, torch.randint(3, (20, 2)), torch.rand(20, 2))


@LAYERS
@WGRADS
def test_hooks_on_saved_tensors_change_nothing(kind, wgrad):
    """They give tensors without attributes, as those of checkpoints do."""
    told = {"grad_added_to_main_grad": False}
    plain, found = make_layer(kind, wgrad, **told), []
    plain(*inputs_of(kind)).float().square().sum().backward()
    for reentrant in (True, False):
        layer = make_layer(kind, wgrad, **told)
        y = checkpoint(layer, *inputs_of(kind), use_reentrant=reentrant)
        y.float().square().sum().backward()
        found.append(layer)
    found.append(make_layer(kind, wgrad, **told))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        y = found[-1](*inputs_of(kind))
    y.float().square().sum().backward()
    for layer in found:
        for ours, theirs in zip(main_grads(layer), main_grads(plain), strict=True):
            assert theirs.any()
            assert torch.equal(ours, theirs)
        assert all(layer.get_parameter(x).grad_added_to_main_grad for x in layer.master_names)


@LAYERS
@WGRADS
def test_who_asks_for_gradients_of_inputs_alone_changes_none_of_weights(kind, wgrad):
    layer = make_layer(kind, wgrad)
    inputs = inputs_of(kind)
    torch.autograd.grad(layer(*inputs).float().sum(), inputs[0])
    layer(*inputs).float().sum().backward(inputs=[inputs[0]])
    assert not any(x.any() for x in main_grads(layer))
    layer(*inputs).float().sum().backward()
    assert all(x.any() for x in main_grads(layer))
    before = [x.clone() for x in main_grads(layer)]
    weight = layer.get_parameter(layer.master_names[0])
    torch.autograd.grad(layer(*inputs).float().sum(), weight, allow_unused=True)
    assert torch.allclose(main_grads(layer)[0], 2 * before[0])


@WGRADS
@pytest.mark.parametrize("overwrites", [True, False])
def test_parts_of_a_call_overwrite_once(wgrad, overwrites, monkeypatch):
    found = []
    for in_order in ([1], [3, 1, 1, 1], [2, 2, 1, 1, 1]):  # one of two parts is split again
        split = iter(in_order * 2)
        monkeypatch.setattr(experts, "parts_of", lambda *_, n=split: next(n))
        layer = make_layer("experts", wgrad, overwrite_main_grad=overwrites)
        for x in main_grads(layer):
            x.fill_(7)
        for _ in range(2):
            layer(*inputs_of("experts")).float().square().sum().backward()
        found.append(main_grads(layer))
    for whole, *others in zip(*found, strict=True):
        assert all((parts - whole).norm() < 0.05 * whole.norm() for parts in others)


@LAYERS
@WGRADS
def test_a_backward_has_the_values_that_were_saved(kind, wgrad):
    """Who keeps copies of saved tensors may write weights before the backward."""
    found = []
    for changes in (False, True):
        layer, (x, *others) = make_layer(kind, wgrad), inputs_of(kind)
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda saved: saved):
            y = layer(x, *others)
        if changes:
            with torch.no_grad():
                [weight.mul_(-1) for weight in layer.parameters()]
        y.float().square().sum().backward()
        found.append([x.grad, *main_grads(layer)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
