"""A linear layer: quantize the activations, then the dense GEMM. M rows, K in, N out.

The gradient in x is a linear with the transposed weight, dX = dY W: dY is quantized to 1x128. With
128x128 blocks, W^T has the codes and scales of W, transposed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..kernels.common.blocks import E4M3, MIN_AMAX, MIN_GRADIENT_AMAX
from ..kernels.common.checks import (
    FLOATS,
    check_bias,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.prepared import Launches, layout_of
from ..kernels.common.tma_operands import fits
from ..kernels.gemm.dense import DenseInputs, block_scaled_matmul, launch_dense
from ..kernels.gemm.operands import check_sizes
from ..kernels.jit import Kernel, current_driver
from ..kernels.program import (
    Codes,
    Record,
    Span,
    Target,
    Tensor,
    kernels_at_any_address,
    layouts,
    prepare_launches,
)
from ..kernels.registry import register_inputs
from ..kernels.targets import target_of
from ..quant.numerics import quantize_1x128
from ..quant.quantize import describe_quantize, launch_quantize_1x128
from ..quant.weight_format import check_weight_scales, tile_scales
from .autograd import first_order, no_gradients, records
from .transposed import transposed

_OP = "fp8_linear"


class LinearInputs(NamedTuple):
    """The inputs of `fp8_linear`.

    x: [M, K] bf16, fp16 or fp32; it is quantized to 1x128.
    weight: e4m3 [N, K]. weight_scale_inv: its scales, fp32, in any of `FORMATS`.
    bias: [N] in bf16, fp16, fp32 or None.
    batch_invariant: a row of the result has the same bits whatever M is, see `fp8_gemm_nt`.
    """

    x: torch.Tensor
    weight: torch.Tensor
    weight_scale_inv: torch.Tensor
    bias: torch.Tensor | None
    batch_invariant: bool = False


def _allocate(inputs: LinearInputs) -> torch.Tensor:
    """Check, then allocate the result; this is also the fake body."""
    x, weight, weight_scale_inv, bias, _ = inputs
    named = {"x": x, "weight": weight, "weight_scale_inv": weight_scale_inv, "bias": bias}
    check_same_device(_OP, **named)
    check_tensor(_OP, "x", x, FLOATS, 2)
    check_tensor(_OP, "weight", weight, (E4M3,), 2)
    (m, k), (n, weight_k) = x.shape, weight.shape
    if k != weight_k:
        raise ValueError(f"{_OP}: K must be equal in x and weight, got {k} and {weight_k}")
    check_weight_scales(_OP, "weight_scale_inv", weight_scale_inv, weight, "N K")
    check_rows_contiguous(_OP, "weight", weight)
    check_bias(_OP, bias, n)
    return x.new_empty((m, n), dtype=torch.bfloat16)


def _body(inputs: LinearInputs) -> torch.Tensor:
    y = _allocate(inputs)
    x, weight, weight_scale_inv, bias, exact = inputs
    scales = tile_scales(weight, weight_scale_inv)
    result = block_scaled_matmul(*quantize_1x128(x), weight, scales, exact=exact)
    return y.copy_(result if bias is None else result + bias.float())


_INPUTS = "x", "weight", "weight_scales", "y", "bias"  # the addresses of a call, in order


def _launch(inputs: LinearInputs, min_amax: float = MIN_AMAX) -> torch.Tensor:
    """`fp8_linear` on a Hopper GPU: two kernels on the current stream; nothing waits for them.

    The second starts before the first ends, and loads weights and bias in the meantime. That is
    safe, since the first writes neither, and lets the second start only after all earlier work.
    """
    x, weight, weight_scale_inv, bias, batch_invariant = inputs
    driver, x_address, weight_address = current_driver(), x.data_ptr(), weight.data_ptr()
    key = (
        _OP,
        layout_of(x),
        layout_of(weight),
        layout_of(weight_scale_inv),
        None if bias is None else layout_of(bias),
        x_address % 16,
        weight_address % 16,
        driver.max_sms,
        min_amax,
        batch_invariant,
    )
    prepared = driver.prepared().get(key)
    if prepared is None:
        _allocate(inputs)
        prepared = driver.keep(key, _prepare(inputs, min_amax))
    (m, _), n = x.shape, weight.shape[0]
    y = torch.empty_strided((m, n), (n, 1), dtype=torch.bfloat16, device=x.device)
    if not prepared.launches:
        data, scale_inv = launch_quantize_1x128(x, False, min_amax)
        scales = tile_scales(weight, weight_scale_inv)
        dense = DenseInputs(data, scale_inv, weight, scales, y, bias, batch_invariant)
        launch_dense(dense, programmatic=True)
        return y
    bias_address = 0 if bias is None else bias.data_ptr()
    addresses = (x_address, weight_address, weight_scale_inv.data_ptr(), y.data_ptr(), bias_address)
    prepared(x.get_device(), addresses)
    return y


def _prepare(inputs: LinearInputs, min_amax: float) -> Launches:
    """The launches of both kernels; none if operands must be copied or there is nothing to do."""
    x, weight, weight_scale_inv, bias, batch_invariant = inputs
    (m, k), n = x.shape, weight.shape[0]
    in_order = x.stride(1) == 1 and (bias is None or bias.is_contiguous())
    if not (m and n and k and k % 16 == n % 8 == 0 and in_order and fits(weight)):
        return Launches((), 0)
    check_sizes(_OP, m, n, k)
    device_index = x.get_device()
    r = Record(target_of(device_index), _INPUTS)
    describe_linear(
        r,
        Tensor.of(x, "x"),
        Codes.of(weight, tile_scales(weight, weight_scale_inv), "weight"),
        Tensor.contiguous("y", m, n),
        **layouts(bias=bias),
        batch_invariant=batch_invariant,
        min_amax=min_amax,
    )
    return prepare_launches(r, device_index)


def describe_linear(
    r: Record,
    x: Tensor,
    weights: Codes,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    batch_invariant: bool = False,
    min_amax: float = MIN_AMAX,
) -> None:
    """Quantize x [M, K], then write y, bf16 [M, N], its product with weights [N, K]."""
    m, k = x.shape
    rows = r.codes("rows", (1, m, k)).first()
    describe_quantize(r, x, rows, None, min_amax=min_amax)
    r.target.gemms.dense(r, rows, weights, y, bias=bias, batch_invariant=batch_invariant)


def linear_kernels(
    target: Target,
    most_tokens: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    bias: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Iterator[Kernel]:
    """The kernels with weights [N, K] for up to `most_tokens` tokens, aligned or not."""

    def describe(span: Span, alignment: int) -> Record:
        r = Record(target, _INPUTS, span=span)
        x = Tensor.contiguous("x", span.first, k, dtype=dtype, alignment=alignment)
        describe_linear(
            r,
            x,
            Codes.contiguous("weight", n, k),
            Tensor.contiguous("y", span.first, n),
            bias=None if bias is None else Tensor.contiguous("bias", n, dtype=bias),
            batch_invariant=batch_invariant,
        )
        return r

    return kernels_at_any_address(describe, most_tokens, dtype.itemsize)


fp8_linear = register_inputs(
    _OP, LinearInputs, "Tensor", reference=_body, fake=_allocate, kernels=_launch
)
"""`quantize_1x128`, then `fp8_gemm_nt`: `LinearInputs` -> bf16 [M, N]. Raises TypeError,
ValueError, naming the argument, the rule and the value."""


# ---- The gradient ----

_BACKWARD = "fp8_linear_backward"


class BackwardInputs(NamedTuple):
    """The inputs of `fp8_linear_backward`.

    grad: [M, N] bf16, fp16 or fp32, the gradient of the result; it is quantized to 1x128.
    weight, weight_scale_inv: as in `LinearInputs`.
    keep_transposed: whether W^T is kept on a GPU, see `transposed`.
    batch_invariant: as in `LinearInputs`.
    """

    grad: torch.Tensor
    weight: torch.Tensor
    weight_scale_inv: torch.Tensor
    keep_transposed: bool | None
    batch_invariant: bool = False


def _allocate_backward(inputs: BackwardInputs) -> torch.Tensor:
    grad, weight, weight_scale_inv, *_ = inputs
    named = {"grad": grad, "weight": weight, "weight_scale_inv": weight_scale_inv}
    check_same_device(_BACKWARD, **named)
    check_tensor(_BACKWARD, "grad", grad, FLOATS, 2)
    check_tensor(_BACKWARD, "weight", weight, (E4M3,), 2)
    (m, _), (n, k) = grad.shape, weight.shape
    check_shape(_BACKWARD, "grad", grad, [m, n], "[M, N] for weight [N, K]")
    return grad.new_empty((m, k), dtype=torch.bfloat16)


def _body_backward(inputs: BackwardInputs) -> torch.Tensor:
    grad, weight, weight_scale_inv, _, exact = inputs
    dx = _allocate_backward(inputs)
    quantized = quantize_1x128(grad, min_amax=MIN_GRADIENT_AMAX)
    scales = tile_scales(weight, weight_scale_inv)
    return dx.copy_(block_scaled_matmul(*quantized, weight.mT, scales.mT, exact=exact))


def _launch_backward(inputs: BackwardInputs) -> torch.Tensor:
    grad, weight, weight_scale_inv, keep_transposed, batch_invariant = inputs
    _allocate_backward(inputs)
    grad = grad if grad.stride(1) == 1 and grad.stride(0) >= grad.shape[1] else grad.contiguous()
    weight = transposed(weight, keep_transposed)
    args = LinearInputs(grad, weight, weight_scale_inv.mT, None, batch_invariant)
    return _launch(args, MIN_GRADIENT_AMAX)


fp8_linear_backward = register_inputs(
    _BACKWARD,
    BackwardInputs,
    "Tensor",
    reference=_body_backward,
    fake=_allocate_backward,
    kernels=_launch_backward,
)
"""`quantize_1x128` of `grad`, then its product with the weight: `BackwardInputs` -> bf16 [M, K]."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: str,
        keep_transposed: bool | None,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        bias: torch.Tensor | None,
        batch_invariant: bool,
    ) -> torch.Tensor:
        ctx.layer, ctx.options, ctx.dtype = layer, (keep_transposed, batch_invariant), x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(weight, weight_scale_inv)
        y: torch.Tensor = fp8_linear(x, weight, weight_scale_inv, bias, batch_invariant)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights = ctx.saved_tensors
        *_, needs_x, needs_weight, needs_scales, needs_bias, _ = ctx.needs_input_grad
        needed = needs_weight, needs_scales
        grad_weights = no_gradients(grad, ctx.layer, needed, weights)
        dx = fp8_linear_backward(grad, *weights, *ctx.options).to(ctx.dtype) if needs_x else None
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return None, None, dx, *grad_weights, grad_bias, None


def linear(
    layer: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    keep_transposed: bool | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """`fp8_linear` -> bf16 [M, N], with gradients in x and the bias.

    layer: the name in the error that a wanted gradient of the weight raises.
    keep_transposed: see `transposed`. batch_invariant: see `LinearInputs`.
    """
    tensors = x, weight, weight_scale_inv, bias
    inputs = *tensors, batch_invariant
    is_recorded = records(layer, *tensors)  # the autograd function is as slow as a launch
    y: torch.Tensor = (
        _Linear.apply(layer, keep_transposed, *inputs) if is_recorded else fp8_linear(*inputs)
    )
    return y
