"""A linear layer whose weight is trained: forward, dX and dW by FP8 GEMMs. M rows, K in, N out.

The weight is the master weight; `weights.codes_of` keeps its codes. In the forward one kernel
makes row codes of x for the GEMM, and column codes (a scale for 128 rows of a feature), which are
saved. The backward quantizes dY likewise: its row codes times W give dX = dY W, its column codes
times those of x give dW = dY^T X. Forward and backward are one prepared launch each.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX, num_blocks
from ...kernels.common.checks import (
    FLOATS,
    check_bias,
    check_same_device,
    check_shape,
    check_tensor,
)
from ...kernels.gemm.dense import fp8_gemm_nt
from ...kernels.gemm.k_grouped import k_grouped_gemm
from ...kernels.registry import Written, register_inputs
from ...quant.columns import empty_columns, quantize_1x128_and_128x1
from ...quant.quantize import quantize_1x128
from ..autograd import first_order, records
from ..linear import fp8_linear
from . import main_grad
from .linear_records import WeightCodes, launch_backward, launch_forward
from .weights import codes_of
from .wgrad import Wgrad, as_written, bf16_gradient, nothing_of

_OP, _BACKWARD = "trained_linear", "trained_linear_backward"


class TrainedLinearInputs(NamedTuple):
    """The inputs of `trained_linear`.

    x: [M, K] bf16, fp16 or fp32. weight: [N, K] bf16, fp16 or fp32. bias: [N], or None.
    reuse_codes: as in `codes_of`.
    saves: whether to make column codes of x.
    blocks: whether these have one scale for 128 features.
    batch_invariant: a row of the result has the same bits whatever M is, see `fp8_gemm_nt`.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    reuse_codes: bool
    saves: bool
    blocks: bool
    batch_invariant: bool


Trained = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the result, and `ColumnCodes`


def _check(inputs: TrainedLinearInputs) -> None:
    x, weight, bias, *_ = inputs
    check_same_device(_OP, x=x, weight=weight, bias=bias)
    check_tensor(_OP, "x", x, FLOATS, 2)
    check_tensor(_OP, "weight", weight, FLOATS, 2)
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{_OP}: K must be equal in x and weight, got {x.shape[1]} and {weight.shape[1]}"
        )
    check_bias(_OP, bias, len(weight))


def _empty(x: torch.Tensor, columns: int) -> torch.Tensor:
    return x.new_empty((len(x), columns), dtype=torch.bfloat16)


def _allocate(inputs: TrainedLinearInputs) -> Trained:
    _check(inputs)
    x, saves = inputs.x, inputs.saves
    columns = (
        quantize_1x128_and_128x1(x, None, False, MIN_AMAX, inputs.blocks)[2:]
        if saves
        else nothing_of(x)
    )
    return _empty(x, len(inputs.weight)), *columns


def _forward(inputs: TrainedLinearInputs) -> Trained:
    x, weight, bias, reuse_codes, saves, blocks, batch_invariant = inputs
    codes = codes_of(weight, reuse_codes=reuse_codes)
    if not saves:
        y = fp8_linear(x, codes.data, codes.scale_inv, bias, batch_invariant)
        return y, *nothing_of(x)
    *rows, data, scale_inv = quantize_1x128_and_128x1(x, None, False, MIN_AMAX, blocks)
    y = _empty(x, len(weight))
    a, b = (rows[0], rows[1]), (codes.data, codes.scale_inv)
    fp8_gemm_nt(a, b, y, bias=bias, batch_invariant=batch_invariant)
    return y, data, scale_inv


def _body(inputs: TrainedLinearInputs) -> Trained:
    _check(inputs)
    return _forward(inputs)


def _launch(inputs: TrainedLinearInputs) -> Trained:
    """On a Hopper GPU: two kernels on the current stream; nothing waits for them."""
    x, weight, bias, reuse_codes, saves, blocks, batch_invariant = inputs
    if not saves or x.ndim != 2 or x.dtype not in FLOATS or x.shape[1:] != weight.shape[1:]:
        return _body(inputs)
    codes = codes_of(weight, reuse_codes=reuse_codes)
    y, columns = _empty(x, len(weight)), empty_columns(*_blocks_of(x), x.device, blocks=blocks)
    weight_codes, check = WeightCodes(codes.data, codes.scale_inv), partial(_check, inputs)
    if launch_forward(check, x, weight_codes, bias, y, columns, blocks, batch_invariant):
        return y, *columns
    return _body(inputs)


def _blocks_of(x: torch.Tensor) -> tuple[int, int]:
    return num_blocks(x.shape[0]), x.shape[1]


trained_linear = register_inputs(
    _OP,
    TrainedLinearInputs,
    "(Tensor, Tensor, Tensor)",
    reference=_body,
    fake=_allocate,
    kernels=_launch,
)
"""`TrainedLinearInputs` -> (bf16 [M, N], column codes of x and their scales, or empty ones)."""


# ---- The gradient ----


class TrainedLinearBackwardInputs(NamedTuple):
    """The inputs of `trained_linear_backward`.

    grad: [M, N] bf16, fp16 or fp32. weight: as in the forward.
    x_columns, x_columns_scale_inv: column codes of x from the forward.
    d: bf16 or fp32 [N, K], written with the gradient of the weight; None: not wanted.
    accumulates: whether the gradient is added to d, in fp32.
    wants_x: whether to compute dX; else it is empty.
    batch_invariant: as in the forward, for dX.
    """

    grad: torch.Tensor
    weight: torch.Tensor
    x_columns: torch.Tensor
    x_columns_scale_inv: torch.Tensor
    d: Written | None
    accumulates: bool
    wants_x: bool
    batch_invariant: bool


def _allocate_backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    """Check, then allocate dX; this is also the fake body."""
    grad, weight = inputs.grad, inputs.weight
    check_same_device(_BACKWARD, grad=grad, weight=weight, x_columns=inputs.x_columns, d=inputs.d)
    check_tensor(_BACKWARD, "grad", grad, FLOATS, 2)
    check_shape(_BACKWARD, "grad", grad, [len(grad), len(weight)], "[M, N] for weight [N, K]")
    return _empty(grad, weight.shape[1] if inputs.wants_x else 0)


def _backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    dx = _allocate_backward(inputs)
    grad, weight, *x_columns, d, accumulates, wants_x, batch_invariant = inputs
    codes = codes_of(weight, is_backward=True) if wants_x else None
    quantized: tuple[torch.Tensor, ...] = ()
    if d is not None:
        quantized = quantize_1x128_and_128x1(grad, None, False, MIN_GRADIENT_AMAX)
    elif wants_x:
        quantized = quantize_1x128(grad, False, MIN_GRADIENT_AMAX)
    if codes:
        weight_codes = codes.transposed, codes.scale_inv.mT
        fp8_gemm_nt((quantized[0], quantized[1]), weight_codes, dx, batch_invariant=batch_invariant)
    if d is not None:
        k_grouped_gemm(*quantized[2:], *x_columns, d, None, len(grad), accumulates)
    return dx


def _launch_backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    grad, weight, x_columns, scale_inv, d, accumulates, wants_x, batch_invariant = inputs
    if d is None or not wants_x:
        return _backward(inputs)
    codes = codes_of(weight, is_backward=True)
    dx, weight_codes = (
        _empty(grad, weight.shape[1]),
        WeightCodes(codes.transposed, codes.scale_inv.mT),
    )
    check, columns = partial(_allocate_backward, inputs), (x_columns, scale_inv)
    if launch_backward(check, grad, weight_codes, columns, dx, d, accumulates, batch_invariant):
        return dx
    return _backward(inputs)


trained_linear_backward = register_inputs(
    _BACKWARD,
    TrainedLinearBackwardInputs,
    "Tensor",
    reference=_backward,
    fake=_allocate_backward,
    kernels=_launch_backward,
)
"""`TrainedLinearBackwardInputs` -> bf16 dX [M, K]; dW = dY^T X goes to d."""


class Trainee(NamedTuple):
    """A weight saved by a forward.

    weight: [N, K]. master: from `main_grad.master`. wgrad: see `Wgrad`.
    """

    weight: torch.Tensor
    master: torch.Tensor | None
    wgrad: Wgrad


def gradients(
    grad: torch.Tensor,
    trainee: Trainee,
    saved_x: Sequence[torch.Tensor],
    needs: tuple[bool, bool],
    batch_invariant: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dX, in bf16, and what a backward returns for the weight.

    grad: [M, N], the gradient of the result. saved_x: x [M, K] itself with wgrad "bf16", else its
        column codes and scales; unused if the weight needs no gradient. needs: of x, of the weight.
    """
    weight, master, wgrad = trainee.weight, trainee.master, trainee.wgrad
    master = weight if master is None else master
    needs_x, needs_weight = needs
    needs_weight = needs_weight and main_grad.is_asked_for(master)
    if needs_weight and wgrad != "bf16":
        d, accumulates = main_grad.target(master)
        written, options = as_written(d), (accumulates, needs_x, batch_invariant)
        dx = trained_linear_backward(grad, weight, *saved_x, written, *options)
        grad_weight = main_grad.result(master, d if written is d else d.copy_(written))
        return (dx if needs_x else None), grad_weight
    dx = grad_weight = None
    if needs_x:
        options = False, True, batch_invariant
        dx = trained_linear_backward(grad, weight, *nothing_of(grad), None, *options)
    if needs_weight:
        grad_weight = bf16_gradient(master, grad, saved_x[0])
    return dx, grad_weight


class _TrainedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wgrad: Wgrad,
        reuse_codes: bool,
        batch_invariant: bool,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        needs_weight = ctx.needs_input_grad[4]
        saves = needs_weight and wgrad != "bf16"
        options = reuse_codes, saves, wgrad == "128x128", batch_invariant
        y: torch.Tensor
        y, *columns = trained_linear(x, weight, bias, *options)
        ctx.wgrad, ctx.dtype, ctx.batch_invariant = wgrad, x.dtype, batch_invariant
        ctx.bias_dtype = None if bias is None else bias.dtype
        saved_x = columns if saves else [x] if needs_weight else []
        ctx.save_for_backward(weight, *saved_x)
        ctx.master = main_grad.master(weight)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *saved_x = ctx.saved_tensors
        *_, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        needs = needs_x, needs_weight
        trainee = Trainee(weight, ctx.master, ctx.wgrad)
        dx, grad_weight = gradients(grad, trainee, saved_x, needs, ctx.batch_invariant)
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return None, None, None, None if dx is None else dx.to(ctx.dtype), grad_weight, grad_bias


def linear(
    layer: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    wgrad: Wgrad,
    *,
    reuse_codes: bool = True,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """bf16 [M, N], with gradients in x, weight and bias, all by FP8 GEMMs.

    layer: the name in errors. wgrad: see `Wgrad`. reuse_codes: see `codes_of`. batch_invariant: see
        `TrainedLinearInputs`.
    """
    y: torch.Tensor
    if records(layer, x, weight, bias):
        y = _TrainedLinear.apply(wgrad, reuse_codes, batch_invariant, x, weight, bias)
    else:
        y, *_ = trained_linear(x, weight, bias, reuse_codes, False, False, batch_invariant)
    return y
