"""A trained linear of each expert, for rows grouped by expert. R rows, K in, N out.

As `linear.py`, with weights [E, N, K]. Each GEMM and quantization takes the rows of all experts at
once; only the device knows how many rows an expert has.
"""

from typing import Any, NamedTuple

import torch

from ...kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX, round_up
from ...kernels.common.checks import FLOATS, check_same_device, check_tensor
from ...kernels.gemm.grouped import m_grouped_fp8_gemm_nt_contiguous
from ...kernels.registry import register_inputs
from ...quant.columns import quantize_1x128_and_128x1
from ...quant.quantize import quantize_1x128
from ..autograd import first_order, records
from . import main_grad
from .linear import Trained
from .weights import codes_of
from .wgrad import Wgrad, nothing_of, weight_gradient

_OP = "trained_grouped_linear"


class TrainedGroupedInputs(NamedTuple):
    """The inputs of `trained_grouped_linear`.

    x: [R, K] bf16, fp16 or fp32. weight: [E, N, K] bf16, fp16 or fp32.
    expert_offsets: int32 [E + 1]; the results of rows of no expert are undefined.
    is_backward: whether x is dY [R, N], and the product is dX = dY W [R, K].
    multiplies, saves: whether to make the product, and column codes of x; else they are empty.
    blocks: whether column codes have one scale for 128 features.
    """

    x: torch.Tensor
    weight: torch.Tensor
    expert_offsets: torch.Tensor
    is_backward: bool
    multiplies: bool
    saves: bool
    blocks: bool


def _empty(inputs: TrainedGroupedInputs) -> torch.Tensor:
    x, weight = inputs.x, inputs.weight
    width = weight.shape[2 if inputs.is_backward else 1] if inputs.multiplies else 0
    return x.new_empty((len(x), round_up(width, 8)), dtype=torch.bfloat16)[:, :width]


def _check(inputs: TrainedGroupedInputs) -> None:
    x, weight, expert_offsets = inputs[:3]
    check_same_device(_OP, x=x, weight=weight, expert_offsets=expert_offsets)
    check_tensor(_OP, "x", x, FLOATS, 2)
    check_tensor(_OP, "weight", weight, FLOATS, 3)
    check_tensor(_OP, "expert_offsets", expert_offsets, (torch.int32,), 1)
    wide = weight.shape[1 if inputs.is_backward else 2]
    if x.shape[1] != wide:
        raise ValueError(f"{_OP}: x must have {wide} columns for its weight, got {x.shape[1]}")


def _quantize_both(inputs: TrainedGroupedInputs) -> tuple[torch.Tensor, ...]:
    min_amax = MIN_GRADIENT_AMAX if inputs.is_backward else MIN_AMAX
    quantized: tuple[torch.Tensor, ...] = quantize_1x128_and_128x1(
        inputs.x, inputs.expert_offsets, False, min_amax, inputs.blocks
    )
    return quantized


def _allocate(inputs: TrainedGroupedInputs) -> Trained:
    _check(inputs)
    data, scale_inv = _quantize_both(inputs)[2:] if inputs.saves else nothing_of(inputs.x)
    return _empty(inputs), data, scale_inv


def _body(inputs: TrainedGroupedInputs) -> Trained:
    _check(inputs)
    x, weight, expert_offsets, is_backward, multiplies, saves, _ = inputs
    y = _empty(inputs)
    codes = codes_of(weight, is_backward=is_backward) if multiplies else None
    quantized: tuple[torch.Tensor, ...] = ()
    if saves:
        quantized = _quantize_both(inputs)
    elif multiplies:
        quantized = quantize_1x128(x, False, MIN_GRADIENT_AMAX if is_backward else MIN_AMAX)
    data, scale_inv = (quantized[2], quantized[3]) if saves else nothing_of(x)
    if codes:
        b = codes.data, codes.scale_inv
        if is_backward:
            b = codes.transposed, codes.scale_inv.mT
        a = quantized[0], quantized[1]
        m_grouped_fp8_gemm_nt_contiguous(a, b, y, expert_offsets=expert_offsets)
    return y, data, scale_inv


trained_grouped_linear = register_inputs(
    _OP,
    TrainedGroupedInputs,
    "(Tensor, Tensor, Tensor)",
    reference=_body,
    fake=_allocate,
    kernels=_body,
)
"""`TrainedGroupedInputs` -> (bf16 rows, column codes of x and their scales)."""


class _TrainedGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wgrad: Wgrad,
        x: torch.Tensor,
        weight: torch.Tensor,
        expert_offsets: torch.Tensor,
    ) -> torch.Tensor:
        saves = ctx.needs_input_grad[2]
        y: torch.Tensor
        y, *columns = trained_grouped_linear(
            x, weight, expert_offsets, False, True, saves, wgrad == "128x128"
        )
        ctx.dtype = x.dtype
        ctx.save_for_backward(weight, expert_offsets, *columns)
        ctx.master = main_grad.master(weight)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, expert_offsets, *x_columns = ctx.saved_tensors
        master = weight if ctx.master is None else ctx.master
        _, needs_x, needs_weight, _ = ctx.needs_input_grad
        needs_weight = needs_weight and main_grad.is_asked_for(master)
        dx, *grad_columns = trained_grouped_linear(
            grad, weight, expert_offsets, True, needs_x, needs_weight, False
        )
        grad_weight = None
        if needs_weight:
            pairs = (grad_columns[0], grad_columns[1]), (x_columns[0], x_columns[1])
            grad_weight = weight_gradient(master, *pairs, len(grad), expert_offsets)
        return None, dx.to(ctx.dtype) if needs_x else None, grad_weight, None


def grouped_linear(
    layer: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    wgrad: Wgrad = "128x1",
) -> torch.Tensor:
    """bf16 [R, N]: row r is x[r] W_e^T for the expert e of r, with gradients in x and weights.

    Rows of no expert and their gradients are undefined.

    Args:
        layer: the name in errors.
        x: [R, K]; weight: [E, N, K]; both bf16, fp16 or fp32.
        expert_offsets: int32 [E + 1], as in `m_grouped_fp8_gemm_nt_contiguous`.
        wgrad: "128x1" or "128x128", see `Wgrad`.
    """
    if wgrad == "bf16":
        raise ValueError(f"{layer}: wgrad must be '128x1' or '128x128' here, got 'bf16'")
    y: torch.Tensor
    if records(layer, x, weight):
        y = _TrainedGroupedLinear.apply(wgrad, x, weight, expert_offsets)
    else:
        y, *_ = trained_grouped_linear(x, weight, expert_offsets, False, True, False, False)
    return y
