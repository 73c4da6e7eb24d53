"""A linear layer whose weight is trained: forward, dX and dW by FP8 GEMMs. M rows, K in, N out.

The weight is the master weight; `weights.codes_of` keeps its codes. In a forward one kernel makes
both codes of x: those of rows for the GEMM, and those of columns (128 rows of a feature), which are
what is saved. A backward does the same to dY: its rows are multiplied by W for dX = dY W, and its
columns by those of x for dW = dY^T X.
"""

from typing import Any, Literal, NamedTuple, get_args

import torch

from ...kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX
from ...kernels.common.checks import FLOATS, check_bias, check_same_device, check_tensor
from ...kernels.common.registry import register_inputs
from ...kernels.gemm.dense import DenseInputs, block_scaled_matmul, launch_dense
from ...kernels.gemm.k_grouped import k_grouped_gemm
from ...quant.columns import quantize_1x128_and_128x1
from ...quant.quantize import quantize_1x128
from ..autograd import first_order, records
from ..linear import fp8_linear
from . import main_grad
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
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    trusts: bool
    saves: bool
    blocks: bool


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


def _multiply(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = a b^T + bias, where weights are older than the kernel that made the codes a."""
    if a[0].device.type == "cpu":
        result = block_scaled_matmul(*a, *b)
        return y.copy_(result if bias is None else result + bias.float())
    launch_dense(DenseInputs(*a, *b, y, bias), programmatic=True)
    return y


def _forward(inputs: TrainedLinearInputs) -> Trained:
    _check(inputs)
    x, weight, bias, trusts, saves, blocks = inputs
    codes = codes_of(weight, trusts=trusts)
    if not saves:
        return fp8_linear(x, codes.data, codes.scale_inv, bias), *nothing_of(x)
    *rows, columns, scale_inv = quantize_1x128_and_128x1(x, None, False, MIN_AMAX, blocks)
    y = _multiply((rows[0], rows[1]), (codes.data, codes.scale_inv), _empty(x, len(weight)), bias)
    return y, columns, scale_inv


trained_linear = register_inputs(
    _OP,
    TrainedLinearInputs,
    "(Tensor, Tensor, Tensor)",
    cpu=_forward,
    fake=_allocate,
    hopper=_forward,
)
"""`TrainedLinearInputs` -> (bf16 [M, N], column codes of x and their scales, or empty ones)."""


# ---- The gradient ----


class TrainedLinearBackwardInputs(NamedTuple):
    """What `trained_linear_backward` takes.

    grad: [M, N] bf16, fp16 or fp32. weight: as in the forward.
    wants_x, wants_columns: what of the results is needed; the others are empty.
    """

    grad: torch.Tensor
    weight: torch.Tensor
    wants_x: bool
    wants_columns: bool


def _allocate_backward(inputs: TrainedLinearBackwardInputs) -> Trained:
    grad, weight, wants_x, wants_columns = inputs
    check_same_device(_BACKWARD, grad=grad, weight=weight)
    check_tensor(_BACKWARD, "grad", grad, FLOATS, 2)
    columns = (
        quantize_1x128_and_128x1(grad, None, False, MIN_GRADIENT_AMAX)[2:]
        if wants_columns
        else nothing_of(grad)
    )
    return _empty(grad, weight.shape[1] if wants_x else 0), *columns


def _backward(inputs: TrainedLinearBackwardInputs) -> Trained:
    grad, weight, wants_x, wants_columns = inputs
    codes = codes_of(weight) if wants_x else None
    of_w = (codes.transposed, codes.scale_inv.mT) if codes else None
    dx = _empty(grad, weight.shape[1] if wants_x else 0)
    if not wants_columns:
        if of_w:
            rows = quantize_1x128(grad, False, MIN_GRADIENT_AMAX)
            _multiply((rows[0], rows[1]), of_w, dx)
        return dx, *nothing_of(grad)
    found = quantize_1x128_and_128x1(grad, None, False, MIN_GRADIENT_AMAX)
    if of_w:
        _multiply((found[0], found[1]), of_w, dx)
    return dx, found[2], found[3]


trained_linear_backward = register_inputs(
    _BACKWARD,
    TrainedLinearBackwardInputs,
    "(Tensor, Tensor, Tensor)",
    cpu=_backward,
    fake=_allocate_backward,
    hopper=_backward,
)
"""`TrainedLinearBackwardInputs` -> (bf16 dX [M, K], column codes of dY and their scales)."""


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
    written = d if d.dtype != torch.float16 else torch.empty_like(d, dtype=torch.float32)
    k_grouped_gemm(*of_y, *of_x, written, expert_offsets, num_tokens, accumulates)
    return main_grad.result(weight, d if written is d else d.copy_(written))


class _TrainedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wgrad: Wgrad,
        trusts: bool,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        needs_weight = ctx.needs_input_grad[3]
        saves = needs_weight and wgrad != "bf16"
        y: torch.Tensor
        y, *columns = trained_linear(x, weight, bias, trusts, saves, wgrad == "128x128")
        ctx.wgrad, ctx.dtype, ctx.num_tokens = wgrad, x.dtype, len(x)
        ctx.bias_dtype = None if bias is None else bias.dtype
        of_x = columns if saves else [x] if needs_weight else []
        ctx.save_for_backward(weight, *of_x)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *of_x = ctx.saved_tensors
        _, _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        wants_columns = needs_weight and ctx.wgrad != "bf16"
        dx, *of_y = trained_linear_backward(grad, weight, needs_x, wants_columns)
        of_weight = of_bias = None
        if wants_columns:
            of_weight = weight_gradient(weight, tuple(of_y), tuple(of_x), ctx.num_tokens)
        elif needs_weight:
            of_weight = _bf16_gradient(weight, grad, of_x[0])
        if needs_bias:
            of_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return None, None, dx.to(ctx.dtype) if needs_x else None, of_weight, of_bias


def _bf16_gradient(
    weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor
) -> torch.Tensor | None:
    d, accumulates = main_grad.target(weight)
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
) -> torch.Tensor:
    """bf16 [M, N], with gradients in x, weight and bias, all by FP8 GEMMs.

    layer: who is named in errors. wgrad: see `Wgrad`. trusts: see `codes_of`.
    """
    y: torch.Tensor
    if records(layer, x, weight, bias):
        y = _TrainedLinear.apply(wgrad, trusts, x, weight, bias)
    else:
        y, *_ = trained_linear(x, weight, bias, trusts, False, False)
    return y
