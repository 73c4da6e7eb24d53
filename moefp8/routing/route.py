"""The router: logits in FP32, and the choice that follows from them.

T tokens, k choices, E experts, H hidden. A Hopper GPU runs `logits.cu` and `top_k.cu` for BF16 x.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..kernels.common.checks import FLOATS, check_same_device, check_shape, check_tensor
from ..kernels.common.prepared import Launches, layout_of
from ..kernels.common.tma_operands import fitting
from ..kernels.jit import Kernel, current_driver
from ..kernels.program import (
    Place,
    Record,
    Span,
    Target,
    Tensor,
    kernels_of,
    prepare_launches,
)
from ..kernels.registry import register_inputs, without_autocast
from ..kernels.targets import target_of
from . import logits_launch
from .logits import exact_logits, route_takes
from .logits_launch import describe_logits
from .route_backward import RouteBackwardInputs, gradients, route_backward
from .top_k import Chosen, TopK, check_choice, choose_by_sigmoid, choose_by_softmax
from .top_k_launch import Choice, TopKInputs, describe_top_k

_OP = "route"


class RouteInputs(NamedTuple):
    """The arguments of `route`.

    x: [T, H] bf16, fp16 or fp32.
    weight: fp32 [E, H].
    bias: fp32 [E], which counts for the choice but not for top_k_weights; or None.
    k: experts of a token.
    by_sigmoid: choose by `sigmoid_group_topk`, which explains the rest; else by `softmax_topk`.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    k: int
    by_sigmoid: bool
    num_groups: int
    topk_groups: int
    renormalize: bool
    scaling_factor: float

    @property
    def choice_op(self) -> str:
        return "sigmoid_group_topk" if self.by_sigmoid else "softmax_topk"

    @property
    def choice(self) -> Choice:
        groups = self.num_groups, self.topk_groups
        return Choice(self.k, *groups, self.renormalize, self.scaling_factor)

    def with_logits(self, logits: torch.Tensor) -> TopKInputs:
        return TopKInputs(logits, self.bias, *self.choice)


def route(*inputs: Any) -> TopK:
    """Choose by the logits `x @ weight.T`, as `softmax_topk` or `sigmoid_group_topk` does.

    inputs: the fields of `RouteInputs`. Gradients flow to x and weight. Sums are in FP32 or FP64,
    whatever `torch.set_float32_matmul_precision` says. On a Hopper GPU, no bit of the choice of a
    BF16 token among up to 512 experts depends on other tokens. There a weight that is not finite
    gives NaN, and an infinite token NaN or Inf.

    Raises TypeError, ValueError, naming the argument, the rule and what came.
    """
    return TopK(*_Route.apply(*inputs))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Chosen:
        index, weights = _route_op(*args)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)  # index has none
        ctx.save_for_backward(args[0], args[1], index)
        ctx.rest = args[3:]
        return index, weights

    @staticmethod
    def backward(ctx: Any, _: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, weight, index = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        _, by_sigmoid, *_, renormalize, scaling_factor = ctx.rest
        rest = by_sigmoid, renormalize, scaling_factor, needs_x, needs_weight
        inputs = RouteBackwardInputs(x, weight, grad, index, *rest)
        if torch.is_grad_enabled():  # there are gradients of gradients
            with without_autocast(x.device):
                grad_x, grad_weight = gradients(inputs)
        else:
            grad_x, grad_weight = route_backward(*inputs)
        grads = grad_x if needs_x else None, grad_weight if needs_weight else None
        return *grads, None, *(None for _ in ctx.rest)


def _allocate(inputs: RouteInputs) -> Chosen:
    """Check, then allocate the results; this is also the fake body."""
    x, weight, bias, k, _, num_groups, topk_groups, *_ = inputs
    check_tensor(_OP, "x", x, FLOATS, 2)
    check_tensor(_OP, "weight", weight, (torch.float32,), 2)
    num_tokens, (num_experts, hidden_size) = x.shape[0], weight.shape  # len(x) would be a constant
    check_shape(_OP, "x", x, [num_tokens, hidden_size], "[T, H] for weight [E, H]")
    check_same_device(_OP, x=x, weight=weight, bias=bias)
    if bias is not None:
        check_tensor(_OP, "bias", bias, (torch.float32,), 1)
        check_shape(_OP, "bias", bias, [num_experts], "[E]")
    check_choice(_OP, num_experts, k, num_groups, topk_groups)
    if not inputs.by_sigmoid and inputs.scaling_factor != 1:
        raise ValueError(
            f"{_OP}: scaling_factor is for by_sigmoid and must else be 1, got "
            f"{inputs.scaling_factor}"
        )
    index = x.new_empty((num_tokens, k), dtype=torch.int64)
    return index, x.new_empty((num_tokens, k), dtype=torch.float32)


def _body(inputs: RouteInputs) -> Chosen:
    _allocate(inputs)
    choice_inputs = inputs.with_logits(exact_logits(inputs.x, inputs.weight))
    if inputs.by_sigmoid:
        return choose_by_sigmoid(*choice_inputs)
    return choose_by_softmax(choice_inputs.logits, choice_inputs.k, choice_inputs.renormalize)


def _launch(inputs: RouteInputs) -> Chosen:
    """Two kernels on the current stream, or two for each part of many tokens; nothing waits."""
    most = logits_launch.most_tokens(*inputs.weight.shape)
    x, weight, bias, *rest = inputs
    if len(x) > most:
        parts = [_launch(inputs._replace(x=part)) for part in x.split(most)]
        index, weights = map(torch.cat, zip(*parts, strict=True))
        return index, weights
    x, weight = fitting(x), fitting(weight)
    bias = None if bias is None else bias.contiguous()
    driver = current_driver()
    bias_layout = None if bias is None else layout_of(bias)
    key = (_OP, layout_of(x), layout_of(weight), bias_layout, *rest)
    prepared = driver.prepared().get(key)
    if prepared is None:
        inputs = inputs._replace(x=x, weight=weight, bias=bias)
        _allocate(inputs)
        prepared = driver.keep(key, _prepare(inputs))
    num_tokens, k, device = len(x), inputs.k, x.device
    index = torch.empty((num_tokens, k), dtype=torch.int64, device=device)
    weights = torch.empty((num_tokens, k), dtype=torch.float32, device=device)
    if prepared.launches:
        bias_address = 0 if bias is None else bias.data_ptr()
        addresses = x.data_ptr(), weight.data_ptr(), bias_address
        prepared(x.get_device(), (*addresses, index.data_ptr(), weights.data_ptr()))
    return index, weights


def _prepare(inputs: RouteInputs) -> Launches:
    x, weight, bias, *_ = inputs
    if not len(x):
        return Launches((), 0)
    device_index = x.get_device()
    r = Record(target_of(device_index), ("x", "weight", "bias", "top_k_index", "top_k_weights"))
    describe_top_k(
        r,
        inputs.choice_op,
        describe_logits(r, Tensor.of(x, "x"), Tensor.of(weight, "weight")),
        None if bias is None else Place("bias"),
        inputs.choice,
        Place("top_k_index"),
        Place("top_k_weights"),
    )
    return prepare_launches(r, device_index)


def route_kernels(
    target: Target, most_tokens: int, choice_op: str, num_experts: int, hidden_size: int
) -> Iterator[Kernel]:
    """The kernels of `route` for up to `most_tokens` tokens in BF16.

    choice_op: "softmax_topk" or "sigmoid_group_topk".
    """
    choice = Choice(1, 1, 1, True, 1.0)  # kernels depend on no part of it

    def describe(span: Span) -> Record:
        r = Record(target, ("x", "weight", "top_k_index", "top_k_weights"), span=span)
        x = Tensor.contiguous("x", span.first, hidden_size)
        weight = Tensor.contiguous("weight", num_experts, hidden_size, dtype=torch.float32)
        results = Place("top_k_index"), Place("top_k_weights")
        describe_top_k(r, choice_op, describe_logits(r, x, weight), None, choice, *results)
        return r

    return kernels_of(describe, most_tokens)


_route_op = register_inputs(
    _OP,
    RouteInputs,
    "(Tensor, Tensor)",
    reference=_body,
    fake=_allocate,
    kernels=_launch,
    cuda=_body,
    kernels_take=route_takes,
    runs_on=logits_launch.ARCHITECTURES,
)
