"""A gated feed-forward that every token takes, with trained weights.

T tokens, H hidden, I intermediate. The forward is that of frozen weights with the codes of the
master weights, so a trainer and a server compute the same bits. It saves x, and gate and up of each
token before the activation. The backward is that of three linears; what is activated, and d[gate |
up], are rounded to BF16 between them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...kernels.common.activation import Activation
from ...kernels.common.blocks import MIN_AMAX
from ...kernels.registry import register_inputs
from ...quant.columns import quantize_128x1
from ..activation import empty_gate_up
from ..activation_rows import activation_rows, activation_rows_grad
from ..autograd import first_order, records
from ..feed_forward import feed_forward, feed_forward_saving
from . import main_grad
from .linear import Trainee, gradients
from .weights import codes_of
from .wgrad import Wgrad

_OP = "trained_feed_forward"


class TrainedFeedForwardInputs(NamedTuple):
    """The inputs of `trained_feed_forward`.

    x: [T, H] bf16, fp16 or fp32. gate, up: [I, H] and down: [H, I], bf16, fp16 or fp32.
    reuse_codes: as in `codes_of`. saves: whether gate and up of tokens are saved for a backward.
    The others: as in `FeedForwardInputs`.
    """

    x: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    activation: Activation
    batch_invariant: bool
    reuse_codes: bool
    saves: bool


def _allocate(inputs: TrainedFeedForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
    y = inputs.x.new_empty(inputs.x.shape, dtype=torch.bfloat16)
    num_rows = inputs.x.shape[0] if inputs.saves else 0
    return y, empty_gate_up(y, num_rows, inputs.gate.shape[0])


def _forward(inputs: TrainedFeedForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
    weights = inputs.gate, inputs.up, inputs.down
    codes = [codes_of(weight, reuse_codes=inputs.reuse_codes) for weight in weights]
    tensors = inputs.x, *(y for x in codes for y in (x.data, x.scale_inv))
    options = inputs.activation, inputs.batch_invariant
    if inputs.saves:
        y, gate_up = feed_forward_saving(*tensors, *options)
        return y, gate_up
    return feed_forward(*tensors, *options), _allocate(inputs)[1]


trained_feed_forward = register_inputs(
    _OP,
    TrainedFeedForwardInputs,
    "(Tensor, Tensor)",
    reference=_forward,
    fake=_allocate,
    kernels=_forward,
)
"""`feed_forward` with the codes of master weights -> (bf16 [T, H]; gate and up of each token, bf16
[T, 2, I], as in `feed_forward_saving`, or empty without `saves`)."""


def _for_weight(x: torch.Tensor, wgrad: Wgrad) -> Sequence[torch.Tensor]:
    """The operands made from x [M, K] for the gradient of the weight that multiplies x."""
    if wgrad == "bf16":
        return [x]
    return quantize_128x1(x, None, None, False, MIN_AMAX, wgrad == "128x128")


class _TrainedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wgrad: Wgrad,
        reuse_codes: bool,
        activation: Activation,
        batch_invariant: bool,
        x: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        y: torch.Tensor
        options = activation, batch_invariant, reuse_codes
        y, gate_up = trained_feed_forward(x, *weights, *options, True)
        ctx.save_for_backward(x, gate_up, *weights)
        ctx.masters = [main_grad.master(weight) for weight in weights]
        ctx.wgrad, ctx.activation, ctx.batch_invariant = wgrad, activation, batch_invariant
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_up, *weights = ctx.saved_tensors
        gate, up, down = (
            Trainee(weight, master, ctx.wgrad)
            for weight, master in zip(weights, ctx.masters, strict=True)
        )
        wgrad, batch_invariant = ctx.wgrad, ctx.batch_invariant
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[4:]
        operands: Sequence[torch.Tensor] = ()
        if needs_down:
            operands = _for_weight(activation_rows(gate_up, ctx.activation), wgrad)
        needs = needs_x or needs_gate or needs_up, needs_down
        grad_activated, grad_down = gradients(grad, down, operands, needs, batch_invariant)
        if grad_activated is None:
            return None, None, None, None, None, None, None, grad_down
        grad_gate_up = activation_rows_grad(grad_activated, gate_up, ctx.activation)
        grad_gated, grad_ungated = grad_gate_up.unbind(1)
        operands = _for_weight(x, wgrad) if needs_gate or needs_up else ()
        needs = needs_x, needs_gate
        dx, grad_gate = gradients(grad_gated, gate, operands, needs, batch_invariant)
        needs = needs_x, needs_up
        dx_up, grad_up = gradients(grad_ungated, up, operands, needs, batch_invariant)
        if dx is not None and dx_up is not None:
            dx = dx.to(x.dtype) + dx_up.to(x.dtype)
        return None, None, None, None, dx, grad_gate, grad_up, grad_down


def shared_experts(
    layer: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    activation: Activation,
    wgrad: Wgrad,
    *,
    reuse_codes: bool,
    batch_invariant: bool,
) -> torch.Tensor:
    """`trained_feed_forward` -> bf16 [T, H], with gradients in x and in the weights.

    layer: the name in errors. weights: of gate, up and down. wgrad: see `Wgrad`.
    """
    y: torch.Tensor
    if records(layer, x, *weights):
        y = _TrainedFeedForward.apply(wgrad, reuse_codes, activation, batch_invariant, x, *weights)
    else:
        y, _ = trained_feed_forward(x, *weights, activation, batch_invariant, reuse_codes, False)
    return y
