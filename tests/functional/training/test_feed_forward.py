"""Gradients of trained shared experts: against FP64, and on a GPU against the CPU."""

import copy
from typing import get_args

import pytest
import torch

from moefp8.functional.training.wgrad import Wgrad
from moefp8.kernels.common.activation import Activation
from moefp8.layers.moe import SharedExperts
from tests import naive
from tests.functional.activation.cases import ACTIVATIONS
from tests.gpu import on_cpu_and_gpu, on_gpu, slow
from tests.layers.gradient_cases import on

WGRADS = get_args(Wgrad)
DTYPES = torch.bfloat16, torch.float16, torch.float32
SIZES = [(16, 256, 384), (130, 144, 264), (33, 77, 40), *slow((4100, 512, 1408))]


def layer_of(hidden_size: int, size: int, activation: Activation, wgrad: str, **options):
    options = {"trainable": True, "wgrad": wgrad, "activation": activation, **options}
    return SharedExperts(hidden_size, size, **options)


def gradients_of(layer, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Those of x, and of the weights of gate, up and down."""
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(layer(x), [x, *layer.parameters()], grad.to(x.dtype)))


def assert_near(found: list[torch.Tensor], right: list[torch.Tensor], most: float) -> None:
    for ours, theirs in zip(found, right, strict=True):
        ours, theirs = ours.cpu().double(), theirs.cpu().double()
        assert (ours - theirs).norm() <= most * theirs.norm()


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_near_those_in_fp64(activation, wgrad, device):
    """Beyond the limit, gate and up have no gradient: those near it may have another one in FP8."""
    torch.manual_seed(0)
    layer = layer_of(144, 264, activation, wgrad)
    x, grad = torch.randn(2, 130, 144).bfloat16()
    leaves = [z.detach().double().requires_grad_() for z in (x, *layer.parameters())]
    rows, gate, up, down = leaves
    y = naive.activate(rows @ gate.T, rows @ up.T, activation) @ down.T
    right = torch.autograd.grad(y, leaves, grad.double())
    found = gradients_of(layer.to(device), *on(device, x, grad))
    assert_near(found, right, 0.08 if activation.limit is None else 0.25)


# ---- On a GPU ----


@on_gpu
@pytest.mark.filterwarnings("error:.*portable PyTorch body")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize(("t", "h", "i"), SIZES)
def test_a_gpu_computes_what_the_cpu_does(t, h, i, wgrad, dtype):
    for activation in ACTIVATIONS:
        layer = layer_of(h, i, activation, wgrad, dtype=dtype)
        x, grad = torch.randn(2, t, h).to(dtype)
        wanted = gradients_of(layer, x, grad)
        found = gradients_of(copy.deepcopy(layer).cuda(), *on("cuda", x, grad))
        assert [z.dtype for z in found] == [z.dtype for z in wanted]
        # At a limit the gradient is not continuous: gate and up are rounded on either side of it.
        assert_near(found, wanted, 0.02 if activation.limit is None else 0.05)


@on_gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_between_linears_a_backward_runs_two_kernels(activation):
    """PyTorch adds the two gradients of x, and computes nothing else."""
    layer = layer_of(256, 384, activation, "128x1", device="cuda")
    x, grad = torch.randn(2, 16, 256, device="cuda").bfloat16()
    gradients_of(layer, x, grad)
    x.requires_grad_()
    y = layer(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(y, [x, *layer.parameters()], grad)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "kernel" in event.name.lower()]
    for name, count in (("activation_rows", 1), ("activation_backward", 1), ("at::native", 1)):
        assert sum(name in kernel for kernel in kernels) == count, kernels
