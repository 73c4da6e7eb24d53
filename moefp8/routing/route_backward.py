"""The gradient of the router: from that of top_k_weights to those of the tokens and of its weight.

T tokens, E experts, H hidden. On a Hopper GPU two kernels make the logits' gradient, for x in BF16.
It leaves as two BF16 numbers, `high` and `low`, which together have 16 bits of its significand, and
PyTorch multiplies them in BF16, with sums in FP32 unless its switches allow cuBLAS others for of_x:

    of_x = high @ weight_high + low @ weight_high + high @ weight_low
    of_weight = high.T @ x + low.T @ x

The product that is left out, of both rests, is below 2^-16 of the others.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..kernels.common.prepared import Launches, layout_of, prepared
from ..kernels.common.registry import register, register_inputs, without_autocast
from ..kernels.common.tma_operands import fitting
from ..kernels.gemm.tuned import target_of
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
from . import logits_launch
from .logits import exact_logits, route_takes
from .logits_launch import describe_logits
from .top_k import grad_of_logits, top_k_backward
from .top_k_backward_launch import NUM_TERMS, TopKBackwardInputs, describe_top_k_backward

_OP = "route_backward"

Gradients = tuple[torch.Tensor, torch.Tensor]


class RouteBackwardInputs(NamedTuple):
    """What `route_backward` takes.

    x: [T, H] bf16, fp16 or fp32. weight: fp32 [E, H].
    grad: [T, k], of top_k_weights. top_k_index: int64 [T, k], who was chosen.
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
    """What was asked for; this is also the fake body."""
    x, weight = inputs[:2]
    of_x = x.new_empty(x.shape if inputs.needs_x else 0)
    return of_x, weight.new_empty(weight.shape if inputs.needs_weight else 0)


def gradients(inputs: RouteBackwardInputs) -> Gradients:
    """By products in FP64, as `exact_logits`; in grad mode PyTorch differentiates all once more."""
    x, weight = inputs[:2]
    of_choice = inputs.with_logits(exact_logits(x, weight))
    is_differentiated = torch.is_grad_enabled()
    found = grad_of_logits(of_choice) if is_differentiated else top_k_backward(*of_choice)
    of_logits, of_x, of_weight = found.double(), x.new_empty(0), weight.new_empty(0)
    if inputs.needs_x:
        of_x = (of_logits @ weight.double()).to(x.dtype)
    if inputs.needs_weight:
        of_weight = (of_logits.T @ x.double()).to(weight.dtype)
    return of_x, of_weight


# ---- On a Hopper GPU ----

_product = register(
    "bf16_product(Tensor a, Tensor b) -> Tensor",
    cpu=lambda a, b: a.float() @ b.float(),
    fake=lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32),
    cuda=lambda a, b: torch.mm(a, b, out_dtype=torch.float32),
)
"""fp32 a @ b, of bf16 a [M, K] and b [K, N]."""


@torch.no_grad()
def _launch(inputs: RouteBackwardInputs) -> Gradients:
    """Two kernels, of very many tokens two for each part of them, and products; nothing waits."""
    if not len(inputs.x):
        return gradients(inputs)
    of_x, of_weight = _allocate(inputs)
    x, weight, num_experts = inputs.x, inputs.weight, len(inputs.weight)
    of_logits = x.new_empty((len(x), NUM_TERMS, num_experts))
    most = logits_launch.most_tokens(*weight.shape)
    grad, index = inputs.grad.float().contiguous(), inputs.top_k_index.contiguous()
    of_tokens, read = (fitting(x), grad, index, of_logits), fitting(weight)
    for some_x, some_grad, some_index, out in zip(*(y.split(most) for y in of_tokens), strict=True):
        some = inputs._replace(x=some_x, weight=read, grad=some_grad, top_k_index=some_index)
        _launch_kernels(some, out)
    with without_autocast(x.device):
        if inputs.needs_x:
            high = weight.bfloat16()
            low = (weight - high).bfloat16()
            torch.mm(of_logits.flatten(1), torch.cat((high, high, low)), out=of_x)
        if inputs.needs_weight:
            high_and_low = _product(of_logits[:, :2].flatten(1).T, x)
            torch.add(*high_and_low.split(num_experts), out=of_weight)
    return of_x, of_weight


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
    """The kernels of `route_backward` for up to so many tokens in BF16."""

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
    cpu=gradients,
    fake=_allocate,
    hopper=_launch,
    cuda=gradients,
    hopper_takes=route_takes,
)
"""`RouteBackwardInputs` -> the gradients of x, in its dtype, and of weight in FP32, contiguous; of
what is not wanted nothing, [0]."""
