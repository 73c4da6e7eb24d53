"""The gradient of a gated feed-forward in its input. T tokens, H hidden, I intermediate.

As in experts_backward.py, but without choices: dA = dO W_down is rounded to BF16; d[gate | up] is
quantized to 1x128, gate and up separately; dX = d[gate | up] W_gate_up.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.common.activation import SWIGLU, Activation
from ..kernels.common.blocks import BLOCK, MIN_GRADIENT_AMAX, round_up
from ..kernels.common.checks import FLOATS, check_same_device, check_shape, check_tensor
from ..kernels.common.prepared import Launches, layout_of, prepared
from ..kernels.common.tma_operands import fitting
from ..kernels.gemm.dense import block_scaled_matmul
from ..kernels.jit import Kernel, current_driver
from ..kernels.program import (
    Codes,
    Record,
    Span,
    Target,
    Tensor,
    kernels_at_any_address,
    prepare_launches,
)
from ..kernels.registry import register_inputs
from ..kernels.targets import target_of
from ..quant.block_scaled import BlockScaled, dequantize
from ..quant.numerics import quantize_1x128
from ..quant.quantize import describe_quantize
from ..quant.weight_format import tile_scales
from .activation import activate_grad, describe_activation_backward, in_saved_layout
from .autograd import first_order, no_gradients, records
from .feed_forward import FeedForwardInputs, feed_forward, feed_forward_saving, pad
from .transposed import transposed, transposed_side_by_side

_OP = "feed_forward_backward"


class FeedForwardBackwardInputs(NamedTuple):
    """The inputs of `feed_forward_backward`.

    grad: [T, H] bf16, fp16 or fp32, the gradient of the result; it is quantized to 1x128.
    gate_up: bf16 [T, 2, I], saved by `feed_forward_saving`.
    keep_transposed: whether transposed weights are kept on a GPU, see `transposed`.
    The others: as in `FeedForwardInputs`.
    """

    grad: torch.Tensor
    gate_up: torch.Tensor
    gate: torch.Tensor
    gate_scale_inv: torch.Tensor
    up: torch.Tensor
    up_scale_inv: torch.Tensor
    down: torch.Tensor
    down_scale_inv: torch.Tensor
    activation: Activation
    keep_transposed: bool | None
    batch_invariant: bool = False


def _allocate(inputs: FeedForwardBackwardInputs) -> torch.Tensor:
    """Check, then allocate the gradient; this is also the fake body."""
    grad, gate_up, (h, i) = inputs.grad, inputs.gate_up, inputs.down.shape
    check_same_device(_OP, grad=grad, gate_up=gate_up, down=inputs.down)
    check_tensor(_OP, "grad", grad, FLOATS, 2)
    num_tokens = grad.shape[0]
    check_shape(_OP, "grad", grad, [num_tokens, h], "[T, H]")
    check_tensor(_OP, "gate_up", gate_up, (torch.bfloat16,), 3)
    check_shape(_OP, "gate_up", gate_up, [num_tokens, 2, i], "[T, 2, I]")
    return grad.new_empty((num_tokens, h), dtype=torch.bfloat16)


def _body(inputs: FeedForwardBackwardInputs) -> torch.Tensor:
    dx = _allocate(inputs)
    grad, gate_up, gate, gate_scale_inv, up, up_scale_inv, down, down_scale_inv, *_ = inputs
    activation, exact = inputs.activation, inputs.batch_invariant
    quantized = quantize_1x128(grad, min_amax=MIN_GRADIENT_AMAX)
    down_scales = tile_scales(down, down_scale_inv)
    grad_activated = block_scaled_matmul(*quantized, down.mT, down_scales.mT, exact=exact)
    halves = (gate, tile_scales(gate, gate_scale_inv)), (up, tile_scales(up, up_scale_inv))
    grad_x, _, _ = through_activation(
        grad_activated.bfloat16(), gate_up, 1.0, halves, activation, exact=exact
    )
    return dx.copy_(grad_x)


def through_activation(
    grad_activated: torch.Tensor,
    gate_up: torch.Tensor,
    weights: torch.Tensor | float,
    halves: Sequence[tuple[torch.Tensor, torch.Tensor]],
    activation: Activation,
    *,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The steps after the first GEMM, in PyTorch: fp32 dX [R, H], `<dA, a>` [R] and d[gate | up]
    [R, 2I] as it was quantized.

    grad_activated: dA, bf16 [R, I]. gate_up: [R, 2, I]. weights: [R, 1], one a row.
    halves: the weights of gate and of up, e4m3 [I, H], and the scales of their tiles.
    exact: as in `block_scaled_matmul`.
    """
    grad, (gate, up) = grad_activated.float(), gate_up.float().unbind(1)
    *grad_halves, activated = activate_grad(grad * weights, gate, up, activation)
    dx, codes = torch.zeros((), device=grad.device), []
    for grad_half, (weight, scale_inv) in zip(grad_halves, halves, strict=True):
        q = quantize_1x128(grad_half, min_amax=MIN_GRADIENT_AMAX)
        dx = dx + block_scaled_matmul(*q, weight.mT, scale_inv.mT, exact=exact)
        codes.append(dequantize(BlockScaled(*q), torch.float32))
    return dx, (grad * activated).sum(-1), torch.cat(codes, 1)


_INPUTS = "grad", "saved", "down", "down_scales", "gate_up", "gate_up_scales", "dx"


def _launch(inputs: FeedForwardBackwardInputs) -> torch.Tensor:
    """On a Hopper GPU: quantize, GEMM, `activation_backward.cu`, GEMM; nothing waits for them."""
    dx = _allocate(inputs)
    grad, keep, (h, i) = inputs.grad, inputs.keep_transposed, inputs.down.shape
    if dx.numel() == 0 or i == 0:
        return dx.zero_()
    gate_scales = tile_scales(inputs.gate, inputs.gate_scale_inv)
    up_scales = tile_scales(inputs.up, inputs.up_scale_inv)
    more = -h % 16
    tensors = (
        (pad(grad, (0, more)) if grad.stride(1) == 1 else pad(grad, (0, more)).contiguous()),
        in_saved_layout(inputs.gate_up),
        fitting(pad(transposed(inputs.down, keep), (0, more))),
        tile_scales(inputs.down, inputs.down_scale_inv).mT,
        fitting(pad(transposed_side_by_side(inputs.gate, inputs.up, keep), (0, 0, 0, more))),
        torch.cat([gate_scales, up_scales]).mT,
        torch.empty_like(pad(dx, (0, more))) if more else dx,
    )
    options = inputs.activation, inputs.batch_invariant
    layouts_of_call = tuple([layout_of(x) for x in tensors]), tensors[0].data_ptr() % 16
    key = (_OP, *layouts_of_call, *options, current_driver().max_sms)
    launches = prepared(key, lambda: _prepare(tensors, *options))
    launches(grad.get_device(), tuple([x.data_ptr() for x in tensors]))
    return dx.copy_(tensors[-1][:, :h]) if more else dx


def _prepare(
    tensors: Sequence[torch.Tensor], activation: Activation, batch_invariant: bool
) -> Launches:
    """tensors: of a call, in the order of `_INPUTS`."""
    grad, saved, down, down_scales, gate_up, gate_up_scales, dx = tensors
    device_index = grad.get_device()
    r = Record(target_of(device_index), _INPUTS)
    describe_backward(
        r,
        Tensor.of(grad, "grad"),
        Tensor.of(saved, "saved"),
        Codes.of(down, down_scales, "down"),
        Codes.of(gate_up, gate_up_scales, "gate_up"),
        Tensor.of(dx, "dx"),
        activation=activation,
        batch_invariant=batch_invariant,
    )
    return prepare_launches(r, device_index)


def describe_backward(
    r: Record,
    grad: Tensor,
    saved: Tensor,
    down: Codes,
    gate_up: Codes,
    dx: Tensor,
    *,
    activation: Activation = SWIGLU,
    batch_invariant: bool = False,
) -> None:
    """Quantize grad [T, H]; multiply by W_down^T, the derivative of the activation, W_gate_up^T.

    Args:
        grad: columns contiguous; 16 divides H.
        saved: bf16 [T, 2, I] as `empty_gate_up` says.
        down, gate_up: W^T, [I, H] and [H, 2 (I rounded up to 128)], and scales. TMA can address
            them.
        dx: bf16 [T, H], contiguous.
    """
    (m, h), i = grad.shape, saved.shape[2]
    k = 2 * round_up(i, BLOCK)
    grad_rows, rows = r.codes("grad_rows", (1, m, h)), r.codes("rows", (1, m, k))
    grad_activated = r.matrices("grad_activated", (1, m, i), torch.bfloat16)
    describe_quantize(r, grad, grad_rows.first(), None, min_amax=MIN_GRADIENT_AMAX)
    dense = r.target.gemms.dense
    dense(r, grad_rows.first(), down, grad_activated.first(), batch_invariant=batch_invariant)
    describe_activation_backward(r, grad_activated, saved, None, rows, activation)
    dense(r, rows.first(), gate_up, dx, batch_invariant=batch_invariant)


def backward_kernels(
    target: Target,
    most_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    activation: Activation = SWIGLU,
    batch_invariant: bool = False,
) -> Iterator[Kernel]:
    """The kernels for up to `most_tokens` BF16 gradients, but those that make W^T."""
    h, i = hidden_size, intermediate_size

    def describe(span: Span, alignment: int) -> Record:
        r = Record(target, _INPUTS, span=span)
        describe_backward(
            r,
            Tensor.contiguous("grad", span.first, h, alignment=alignment),
            Tensor.contiguous("saved", span.first, 2, i),
            Codes.contiguous("down", i, h),
            Codes.contiguous("gate_up", h, 2 * round_up(i, BLOCK)),
            Tensor.contiguous("dx", span.first, h),
            activation=activation,
            batch_invariant=batch_invariant,
        )
        return r

    return kernels_at_any_address(describe, most_tokens, torch.bfloat16.itemsize)


feed_forward_backward = register_inputs(
    _OP, FeedForwardBackwardInputs, "Tensor", reference=_body, fake=_allocate, kernels=_launch
)
"""`FeedForwardBackwardInputs` -> bf16 dX [T, H]; the head of this file has the formulas."""


# ---- Autograd ----


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: str, keep_transposed: bool | None, *args: Any) -> torch.Tensor:
        inputs = FeedForwardInputs(*args)
        y, gate_up = feed_forward_saving(*inputs)
        ctx.save_for_backward(gate_up, *inputs[1:7])
        ctx.layer, ctx.dtype = layer, inputs.x.dtype
        ctx.options = inputs.activation, keep_transposed, inputs.batch_invariant
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, (needs_x, *needed, _, _) = ctx.saved_tensors, ctx.needs_input_grad[2:]
        grad_weights = no_gradients(grad, ctx.layer, needed, saved[1:])
        dx = feed_forward_backward(grad, *saved, *ctx.options).to(ctx.dtype) if needs_x else None
        return None, None, dx, *grad_weights, None, None


def shared_experts(
    layer: str, inputs: FeedForwardInputs, keep_transposed: bool | None = None
) -> torch.Tensor:
    """`feed_forward` -> bf16 [T, H], with a gradient in x.

    layer: the name in the error that a wanted gradient of a weight raises.
    keep_transposed: see `transposed`.
    """
    y: torch.Tensor
    if records(layer, *inputs):
        y = _FeedForward.apply(layer, keep_transposed, *inputs)
    else:
        y = feed_forward(*inputs)
    return y
