"""The gradients of the router in x and weight, from the gradient of top_k_weights.

T tokens, k choices each, E experts, H hidden size. On a Hopper GPU, with x in BF16, two kernels
write the gradient of the logits as two BF16 numbers, `high` and `low`, which together have 16 bits
of its significand. PyTorch multiplies these in BF16. It sums in FP32, unless its settings allow
cuBLAS to sum grad_x otherwise:

    grad_x = high @ weight_high + low @ weight_high + high @ weight_low
    grad_weight = high.T @ x + low.T @ x

The product that is left out, low @ weight_low, is below 2^-16 of the others.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..kernels.common.prepared import Launches, layout_of, prepared
from ..kernels.common.tma_operands import fitting
from ..kernels.jit import Kernel
from ..kernels.program import (
    Place,
    Record,
    Span,
    Target,
    Tensor,
    kernels_of,
    prepare_launches,
)
from ..kernels.registry import register, register_inputs, without_autocast
from ..kernels.targets import target_of
from . import logits_launch
from .logits import exact_logits, route_takes
from .logits_launch import describe_logits
from .top_k import grad_of_logits, top_k_backward
from .top_k_backward_launch import NUM_TERMS, TopKBackwardInputs, describe_top_k_backward

_OP = "route_backward"

Gradients = tuple[torch.Tensor, torch.Tensor]


class RouteBackwardInputs(NamedTuple):
    """The arguments of `route_backward`.

    x: [T, H] bf16, fp16 or fp32. weight: fp32 [E, H].
    grad: [T, k], of top_k_weights. top_k_index: int64 [T, k], the chosen experts.
    by_sigmoid, renormalize, scaling_factor: as in `RouteInputs`.
    needs_x, needs_weight: which gradients are wanted.
    """

    x: torch.Tensor
    weight: torch.Tensor
    grad: torch.Tensor
    top_k_index: torch.Tensor
    by_sigmoid: bool
    renormalize: bool
    scaling_factor: float
    needs_x: bool
    needs_weight: bool

    def with_logits(self, logits: torch.Tensor) -> TopKBackwardInputs:
        return TopKBackwardInputs(self.grad, logits, *self[3:7])


def _allocate(inputs: RouteBackwardInputs) -> Gradients:
    """Uninitialised gradients, [0] for one that is not wanted; this is also the fake body."""
    x, weight = inputs[:2]
    grad_x = x.new_empty(x.shape if inputs.needs_x else 0)
    return grad_x, weight.new_empty(weight.shape if inputs.needs_weight else 0)


def gradients(inputs: RouteBackwardInputs) -> Gradients:
    """The gradients by products in FP64; in grad mode PyTorch can differentiate them again."""
    x, weight = inputs[:2]
    choice_inputs = inputs.with_logits(exact_logits(x, weight))
    can_differentiate = torch.is_grad_enabled()
    grad = grad_of_logits(choice_inputs) if can_differentiate else top_k_backward(*choice_inputs)
    grad_logits, grad_x, grad_weight = grad.double(), x.new_empty(0), weight.new_empty(0)
    if inputs.needs_x:
        grad_x = (grad_logits @ weight.double()).to(x.dtype)
    if inputs.needs_weight:
        grad_weight = (grad_logits.T @ x.double()).to(weight.dtype)
    return grad_x, grad_weight


# ---- On a Hopper GPU ----

_product = register(
    "bf16_product(Tensor a, Tensor b) -> Tensor",
    reference=lambda a, b: a.float() @ b.float(),
    fake=lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32),
    cuda=lambda a, b: torch.mm(a, b, out_dtype=torch.float32),
)
"""fp32 a @ b, of bf16 a [M, K] and b [K, N]."""


@torch.no_grad()
def _launch(inputs: RouteBackwardInputs) -> Gradients:
    """Two kernels, or two for each part of very many tokens, then products; nothing waits."""
    if not len(inputs.x):
        return gradients(inputs)
    grad_x, grad_weight = _allocate(inputs)
    x, weight, num_experts = inputs.x, inputs.weight, len(inputs.weight)
    grad_logits = x.new_empty((len(x), NUM_TERMS, num_experts))
    most = logits_launch.most_tokens(*weight.shape)
    grad, index = inputs.grad.float().contiguous(), inputs.top_k_index.contiguous()
    tensors, tma_weight = (fitting(x), grad, index, grad_logits), fitting(weight)
    for part_x, part_grad, part_index, out in zip(*(y.split(most) for y in tensors), strict=True):
        part = inputs._replace(x=part_x, weight=tma_weight, grad=part_grad, top_k_index=part_index)
        _launch_kernels(part, out)
    with without_autocast(x.device):
        if inputs.needs_x:
            high = weight.bfloat16()
            low = (weight - high).bfloat16()
            torch.mm(grad_logits.flatten(1), torch.cat((high, high, low)), out=grad_x)
        if inputs.needs_weight:
            high_and_low = _product(grad_logits[:, :2].flatten(1).T, x)
            torch.add(*high_and_low.split(num_experts), out=grad_weight)
    return grad_x, grad_weight


def _launch_kernels(inputs: RouteBackwardInputs, out: torch.Tensor) -> None:
    """out: bf16 [T, 3, E], high, low and high."""
    x, weight, grad, index, *options = inputs[:7]
    key = (_OP, layout_of(x), layout_of(weight), grad.shape[1], *options)
    launches = prepared(key, lambda: _prepare(inputs))
    tensors = x, weight, grad, index, out
    launches(x.get_device(), tuple([y.data_ptr() for y in tensors]))


def _prepare(inputs: RouteBackwardInputs) -> Launches:
    x, weight = inputs.x, inputs.weight
    device_index = x.get_device()
    r = Record(target_of(device_index), ("x", "weight", "grad", "top_k_index", "grad_logits"))
    describe_top_k_backward(
        r,
        describe_logits(r, Tensor.of(x, "x"), Tensor.of(weight, "weight")),
        Place("grad"),
        Place("top_k_index"),
        Place("grad_logits"),
        inputs.top_k_index.shape[1],
        by_sigmoid=inputs.by_sigmoid,
        renormalize=inputs.renormalize,
        scaling_factor=inputs.scaling_factor,
    )
    return prepare_launches(r, device_index)


def route_backward_kernels(
    target: Target, most_tokens: int, num_experts: int, hidden_size: int, *, by_sigmoid: bool
) -> Iterator[Kernel]:
    """The kernels of `route_backward` for up to `most_tokens` tokens in BF16."""

    def describe(span: Span) -> Record:
        r = Record(target, ("x", "weight", "grad", "top_k_index", "grad_logits"), span=span)
        x = Tensor.contiguous("x", span.first, hidden_size)
        weight = Tensor.contiguous("weight", num_experts, hidden_size, dtype=torch.float32)
        describe_top_k_backward(
            r,
            describe_logits(r, x, weight),
            Place("grad"),
            Place("top_k_index"),
            Place("grad_logits"),
            top_k=1,
            by_sigmoid=by_sigmoid,
            renormalize=True,
            scaling_factor=1.0,
        )
        return r

    return kernels_of(describe, most_tokens)


route_backward = register_inputs(
    _OP,
    RouteBackwardInputs,
    "(Tensor, Tensor)",
    reference=gradients,
    fake=_allocate,
    kernels=_launch,
    cuda=gradients,
    kernels_take=route_takes,
    runs_on=logits_launch.ARCHITECTURES,
)
"""`RouteBackwardInputs` -> the gradients of x, in its dtype, and of weight in FP32, contiguous; a
gradient that is not wanted is [0]."""
