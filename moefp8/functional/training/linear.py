"""A linear layer whose weight is trained: forward, dX and dW by FP8 GEMMs. M rows, K in, N out.

The weight is the master weight; `weights.codes_of` keeps its codes. In a forward one kernel makes
both codes of x: those of rows for the GEMM, and those of columns (128 rows of a feature), which are
what is saved. A backward does the same to dY: its rows are multiplied by W for dX = dY W, and its
columns by those of x for dW = dY^T X. All kernels of either are one prepared launch.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from ...kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX, num_blocks
from ...kernels.common.checks import (
    FLOATS,
    check_bias,
    check_same_device,
    check_shape,
    check_tensor,
)
from ...kernels.common.registry import Written, register_inputs, without_autocast
from ...kernels.gemm.dense import fp8_gemm_nt
from ...kernels.gemm.k_grouped import k_grouped_gemm
from ...quant.columns import empty_columns, quantize_1x128_and_128x1
from ...quant.quantize import quantize_1x128
from ..autograd import first_order, records
from ..linear import fp8_linear
from . import main_grad
from .linear_launch import WeightCodes, launch_backward, launch_forward
from .weights import codes_of

_OP, _BACKWARD = "trained_linear", "trained_linear_backward"
Wgrad = Literal["128x1", "128x128", "bf16"]
"""How the inputs of a gradient in weights are held: in FP8 with a scale for 128 tokens of a
feature, or of 128 features; or in BF16, and then so are the gradients that they meet."""


def check_wgrad(layer: str, wgrad: str) -> None:
    if wgrad not in get_args(Wgrad):
        raise ValueError(f"{layer}: wgrad must be '128x1', '128x128' or 'bf16', got {wgrad!r}")


class TrainedLinearInputs(NamedTuple):
    """What `trained_linear` takes.

    x: [M, K] bf16, fp16 or fp32. weight: [N, K] bf16, fp16 or fp32. bias: [N], or None.
    trusts: as in `codes_of`.
    saves: whether column codes of x are made.
    blocks: whether they have one scale for 128 features.
    batch_invariant: a row of the result has the same bits whatever M is, see `fp8_gemm_nt`.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    trusts: bool
    saves: bool
    blocks: bool
    batch_invariant: bool


Saved = tuple[torch.Tensor, torch.Tensor]  # column codes and their scales
Trained = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # what an op gives, and `Saved`


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


def nothing_of(x: torch.Tensor) -> Saved:
    """In the place of column codes that nobody needs."""
    return x.new_empty(0, dtype=torch.float8_e4m3fn), x.new_empty(0, dtype=torch.float32)


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
    x, weight, bias, trusts, saves, blocks, batch_invariant = inputs
    codes = codes_of(weight, trusts=trusts)
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
    x, weight, bias, trusts, saves, blocks, batch_invariant = inputs
    if not saves or x.ndim != 2 or x.dtype not in FLOATS or x.shape[1:] != weight.shape[1:]:
        return _body(inputs)
    codes = codes_of(weight, trusts=trusts)
    y, columns = _empty(x, len(weight)), empty_columns(*_blocks_of(x), x.device, blocks=blocks)
    of_w, check = WeightCodes(codes.data, codes.scale_inv), partial(_check, inputs)
    if launch_forward(check, x, of_w, bias, y, columns, blocks, batch_invariant):
        return y, *columns
    return _body(inputs)


def _blocks_of(x: torch.Tensor) -> tuple[int, int]:
    return num_blocks(x.shape[0]), x.shape[1]


trained_linear = register_inputs(
    _OP,
    TrainedLinearInputs,
    "(Tensor, Tensor, Tensor)",
    cpu=_body,
    fake=_allocate,
    hopper=_launch,
)
"""`TrainedLinearInputs` -> (bf16 [M, N], column codes of x and their scales, or empty ones)."""


# ---- The gradient ----


class TrainedLinearBackwardInputs(NamedTuple):
    """What `trained_linear_backward` takes.

    grad: [M, N] bf16, fp16 or fp32. weight: as in the forward.
    of_x, of_x_scale_inv: column codes of x, as the forward gave them.
    d: bf16 or fp32 [N, K], where the gradient of the weight goes; None: it is not wanted.
    accumulates: whether it is added to what is there, in fp32.
    wants_x: whether dX is wanted, which else is empty.
    batch_invariant: as in the forward, for dX.
    """

    grad: torch.Tensor
    weight: torch.Tensor
    of_x: torch.Tensor
    of_x_scale_inv: torch.Tensor
    d: Written | None
    accumulates: bool
    wants_x: bool
    batch_invariant: bool


def _allocate_backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    """Check, then allocate dX; this is also the fake body."""
    grad, weight = inputs.grad, inputs.weight
    check_same_device(_BACKWARD, grad=grad, weight=weight, of_x=inputs.of_x, d=inputs.d)
    check_tensor(_BACKWARD, "grad", grad, FLOATS, 2)
    check_shape(_BACKWARD, "grad", grad, [len(grad), len(weight)], "[M, N] for weight [N, K]")
    return _empty(grad, weight.shape[1] if inputs.wants_x else 0)


def _backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    dx = _allocate_backward(inputs)
    grad, weight, *of_x, d, accumulates, wants_x, batch_invariant = inputs
    codes = codes_of(weight, is_backward=True) if wants_x else None
    found: tuple[torch.Tensor, ...] = ()
    if d is not None:
        found = quantize_1x128_and_128x1(grad, None, False, MIN_GRADIENT_AMAX)
    elif wants_x:
        found = quantize_1x128(grad, False, MIN_GRADIENT_AMAX)
    if codes:
        of_w = codes.transposed, codes.scale_inv.mT
        fp8_gemm_nt((found[0], found[1]), of_w, dx, batch_invariant=batch_invariant)
    if d is not None:
        k_grouped_gemm(*found[2:], *of_x, d, None, len(grad), accumulates)
    return dx


def _launch_backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    grad, weight, of_x, scale_inv, d, accumulates, wants_x, batch_invariant = inputs
    if d is None or not wants_x:
        return _backward(inputs)
    codes = codes_of(weight, is_backward=True)
    dx, of_w = _empty(grad, weight.shape[1]), WeightCodes(codes.transposed, codes.scale_inv.mT)
    check, columns = partial(_allocate_backward, inputs), (of_x, scale_inv)
    if launch_backward(check, grad, of_w, columns, dx, d, accumulates, batch_invariant):
        return dx
    return _backward(inputs)


trained_linear_backward = register_inputs(
    _BACKWARD,
    TrainedLinearBackwardInputs,
    "Tensor",
    cpu=_backward,
    fake=_allocate_backward,
    hopper=_launch_backward,
)
"""`TrainedLinearBackwardInputs` -> bf16 dX [M, K]; dW = dY^T X goes to d."""


def weight_gradient(
    weight: torch.Tensor,
    of_y: Saved,
    of_x: Saved,
    num_tokens: int,
    expert_offsets: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """What a backward returns for a weight whose gradient is dY^T X: see `main_grad`.

    weight: [N, K], or [E, N, K] with expert_offsets.
    of_y, of_x: column codes of dY and of X.
    """
    d, accumulates = main_grad.target(weight)
    written = as_written(d)
    k_grouped_gemm(*of_y, *of_x, written, expert_offsets, num_tokens, accumulates)
    return main_grad.result(weight, d if written is d else d.copy_(written))


class Trainee(NamedTuple):
    """A weight as a forward saved it.

    weight: [N, K]. master: what `main_grad.master` gave for it. wgrad: see `Wgrad`.
    """

    weight: torch.Tensor
    master: torch.Tensor | None
    wgrad: Wgrad


def gradients(
    grad: torch.Tensor,
    trainee: Trainee,
    of_x: Sequence[torch.Tensor],
    needs: tuple[bool, bool],
    batch_invariant: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dX, in bf16, and what a backward returns for the weight.

    grad: that of the result, [M, N]. of_x: x [M, K] itself with wgrad "bf16", else its column codes
        and their scales; neither if the weight needs no gradient. needs: which of both are wanted.
    """
    weight, master, wgrad = trainee.weight, trainee.master, trainee.wgrad
    master = weight if master is None else master
    needs_x, needs_weight = needs
    needs_weight = needs_weight and main_grad.is_asked_for(master)
    if needs_weight and wgrad != "bf16":
        d, accumulates = main_grad.target(master)
        written, options = as_written(d), (accumulates, needs_x, batch_invariant)
        dx = trained_linear_backward(grad, weight, *of_x, written, *options)
        of_weight = main_grad.result(master, d if written is d else d.copy_(written))
        return (dx if needs_x else None), of_weight
    dx = of_weight = None
    if needs_x:
        options = False, True, batch_invariant
        dx = trained_linear_backward(grad, weight, *nothing_of(grad), None, *options)
    if needs_weight:
        of_weight = _bf16_gradient(master, grad, of_x[0])
    return dx, of_weight


class _TrainedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wgrad: Wgrad,
        trusts: bool,
        batch_invariant: bool,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        needs_weight = ctx.needs_input_grad[4]
        saves = needs_weight and wgrad != "bf16"
        options = trusts, saves, wgrad == "128x128", batch_invariant
        y: torch.Tensor
        y, *columns = trained_linear(x, weight, bias, *options)
        ctx.wgrad, ctx.dtype, ctx.batch_invariant = wgrad, x.dtype, batch_invariant
        ctx.bias_dtype = None if bias is None else bias.dtype
        of_x = columns if saves else [x] if needs_weight else []
        ctx.save_for_backward(weight, *of_x)
        ctx.master = main_grad.master(weight)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *of_x = ctx.saved_tensors
        *_, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        needs = needs_x, needs_weight
        held = Trainee(weight, ctx.master, ctx.wgrad)
        dx, of_weight = gradients(grad, held, of_x, needs, ctx.batch_invariant)
        of_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return None, None, None, None if dx is None else dx.to(ctx.dtype), of_weight, of_bias


def as_written(d: torch.Tensor) -> torch.Tensor:
    """d itself, or FP32 in its place where it has a dtype that the GEMM does not write."""
    return torch.empty_like(d, dtype=torch.float32) if d.dtype == torch.float16 else d


def _bf16_gradient(
    weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor
) -> torch.Tensor | None:
    d, accumulates = main_grad.target(weight)
    with without_autocast(grad.device):
        product = grad.bfloat16().T @ x.bfloat16()
    return main_grad.result(weight, d.add_(product) if accumulates else d.copy_(product))


def linear(
    layer: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    wgrad: Wgrad,
    *,
    trusts: bool = True,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """bf16 [M, N], with gradients in x, weight and bias, all by FP8 GEMMs.

    layer: who is named in errors. wgrad: see `Wgrad`. trusts: see `codes_of`. batch_invariant: see
        `TrainedLinearInputs`.
    """
    y: torch.Tensor
    if records(layer, x, weight, bias):
        y = _TrainedLinear.apply(wgrad, trusts, batch_invariant, x, weight, bias)
    else:
        y, *_ = trained_linear(x, weight, bias, trusts, False, False, batch_invariant)
    return y
