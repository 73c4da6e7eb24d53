"""The gradient of a SwiGLU feed-forward in its input. T tokens, H hidden, I intermediate.

As in experts_backward.py, without a choice: dA = dO W_down is rounded to BF16; d[gate | up] is
quantized to 1x128, gate and up apart; dX = d[gate | up] W_gate_up.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.common.blocks import (
    BLOCK,
    E4M3,
    MIN_GRADIENT_AMAX,
    empty_tma_aligned,
    num_blocks,
    round_up,
)
from ..kernels.common.checks import FLOATS, check_same_device, check_shape, check_tensor
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.common.registry import register_inputs
from ..kernels.gemm.dense import DenseInputs, block_scaled_matmul, launch_dense
from ..kernels.gemm.tuned import target_of
from ..kernels.jit import Launch
from ..kernels.program import Codes, Record, Tensor, prepare_launch
from ..quant.numerics import quantize_1x128
from ..quant.quantize import launch_quantize_1x128
from .autograd import first_order, no_gradients, records
from .feed_forward import FeedForwardInputs, feed_forward, feed_forward_saving
from .swiglu import as_saved, swiglu_grad
from .swiglu_backward_launch import describe_swiglu_backward
from .transposed import transposed, transposed_side_by_side

_OP = "feed_forward_backward"


class FeedForwardBackwardInputs(NamedTuple):
    """What `feed_forward_backward` takes.

    grad: [T, H] bf16, fp16 or fp32, that of the result; it is quantized to 1x128.
    gate_up: bf16 [T, 2, I], what `feed_forward_saving` gave.
    keeps: whether transposed weights are kept on a GPU, see `transposed`.
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
    swiglu_limit: float | None
    keeps: bool | None
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
    limit, exact = inputs.swiglu_limit, inputs.batch_invariant
    quantized = quantize_1x128(grad, min_amax=MIN_GRADIENT_AMAX)
    of_activated = block_scaled_matmul(*quantized, down.mT, down_scale_inv.mT, exact=exact)
    halves = (gate, gate_scale_inv), (up, up_scale_inv)
    of_x, _ = through_swiglu(of_activated.bfloat16(), gate_up, 1.0, halves, limit, exact=exact)
    return dx.copy_(of_x)


def through_swiglu(
    of_activated: torch.Tensor,
    gate_up: torch.Tensor,
    weights: torch.Tensor | float,
    halves: Sequence[tuple[torch.Tensor, torch.Tensor]],
    limit: float | None,
    *,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numerics behind the first GEMM, in PyTorch: fp32 dX [R, H] and `<dA, a>` [R].

    of_activated: dA, bf16 [R, I]. gate_up: [R, 2, I]. weights: of each row [R, 1].
    halves: the weights of gate and of up, e4m3 [I, H], and their scales.
    exact: as in `block_scaled_matmul`.
    """
    grad, (gate, up) = of_activated.float(), gate_up.float().unbind(1)
    *of_halves, activated = swiglu_grad(grad * weights, gate, up, limit)
    dx = torch.zeros((), device=grad.device)
    for of_half, (weight, scale_inv) in zip(of_halves, halves, strict=True):
        q = quantize_1x128(of_half, min_amax=MIN_GRADIENT_AMAX)
        dx = dx + block_scaled_matmul(*q, weight.mT, scale_inv.mT, exact=exact)
    return dx, (grad * activated).sum(-1)


def _launch(inputs: FeedForwardBackwardInputs) -> torch.Tensor:
    """On a Hopper GPU: quantize, GEMM, `swiglu_backward.cu`, GEMM; nothing waits for them."""
    dx = _allocate(inputs)
    grad, gate_up, keeps = inputs.grad, as_saved(inputs.gate_up), inputs.keeps
    num_tokens, i = grad.shape[0], inputs.down.shape[1]
    if dx.numel() == 0 or i == 0:
        return dx.zero_()
    down = transposed(inputs.down, keeps)
    both = transposed_side_by_side(inputs.gate, inputs.up, keeps)
    scales = torch.cat([inputs.gate_scale_inv, inputs.up_scale_inv])
    data, scale_inv = launch_quantize_1x128(grad, False, MIN_GRADIENT_AMAX)
    of_activated = grad.new_empty(num_tokens, round_up(i, 8), dtype=torch.bfloat16)[:, :i]
    of_down = data, scale_inv, down, inputs.down_scale_inv.mT, of_activated, None
    batch_invariant = inputs.batch_invariant
    launch_dense(DenseInputs(*of_down, batch_invariant), programmatic=True, d_is_padded=True)
    rows = grad.new_empty(num_tokens, 2 * round_up(i, BLOCK), dtype=E4M3)
    row_scales = empty_tma_aligned((num_tokens, 2 * num_blocks(i)), grad.device)
    limit = math.inf if inputs.swiglu_limit is None else inputs.swiglu_limit

    def prepare() -> Launch:
        device_index = grad.get_device()
        r = Record(target_of(device_index), ("grad_activated", "saved", "rows", "rows_scales"))
        describe_swiglu_backward(
            r,
            Tensor.of(of_activated, "grad_activated"),
            Tensor.of(gate_up, "saved"),
            None,
            Codes.of(rows, row_scales, "rows"),
            limit,
        )
        return prepare_launch(r, device_index)

    launch = prepared((_OP, layout_of(gate_up), limit), prepare)
    addresses = tuple([x.data_ptr() for x in (of_activated, gate_up, rows, row_scales)])
    launch.on(grad.get_device(), addresses)
    of_gate_up = rows, row_scales, both, scales.mT, dx, None
    launch_dense(DenseInputs(*of_gate_up, batch_invariant), programmatic=True)
    return dx


feed_forward_backward = register_inputs(
    _OP, FeedForwardBackwardInputs, "Tensor", cpu=_body, fake=_allocate, hopper=_launch
)
"""`FeedForwardBackwardInputs` -> bf16 [T, H], as the head of this file says."""


# ---- Autograd ----


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: str, keeps: bool | None, *inputs: Any) -> torch.Tensor:
        told = FeedForwardInputs(*inputs)
        y, gate_up = feed_forward_saving(*inputs)
        ctx.save_for_backward(gate_up, *inputs[1:7])
        ctx.layer, ctx.dtype = layer, told.x.dtype
        ctx.options = told.swiglu_limit, keeps, told.batch_invariant
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, (needs_x, *needed, _, _) = ctx.saved_tensors, ctx.needs_input_grad[2:]
        of_weights = no_gradients(grad, ctx.layer, needed, saved[1:])
        dx = feed_forward_backward(grad, *saved, *ctx.options).to(ctx.dtype) if needs_x else None
        return None, None, dx, *of_weights, None, None


def shared_experts(
    layer: str, inputs: FeedForwardInputs, keeps: bool | None = None
) -> torch.Tensor:
    """`feed_forward` -> bf16 [T, H], with a gradient in x.

    layer: who is named if a gradient of a weight is wanted, which is an error.
    keeps: see `transposed`.
    """
    y: torch.Tensor
    if records(layer, *inputs):
        y = _FeedForward.apply(layer, keeps, *inputs)
    else:
        y = feed_forward(*inputs)
    return y
