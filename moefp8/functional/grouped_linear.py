"""A linear of each expert, for rows grouped by expert. R rows, K in, N out, E experts.

`experts` does not use it, since its GEMMs quantize their own results. Experts with adapters or
another activation between the GEMMs do.
"""

from typing import Any

import torch

from ..kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX, round_up
from ..kernels.gemm.grouped import m_grouped_fp8_gemm_nt_contiguous
from ..kernels.registry import register
from ..quant.quantize import quantize_1x128
from ..quant.weight_format import tile_scales
from .autograd import first_order, no_gradients, records
from .transposed import transposed


def _grouped(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    expert_offsets: torch.Tensor,
    min_amax: float,
) -> torch.Tensor:
    result = rows.new_zeros(rows.shape[0], weight.shape[1], dtype=torch.bfloat16)
    a = quantize_1x128(rows.contiguous(), False, min_amax)
    b = weight, tile_scales(weight, scale_inv)
    m_grouped_fp8_gemm_nt_contiguous(a, b, result, expert_offsets=expert_offsets)
    return result


def _backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    expert_offsets: torch.Tensor,
    keep_transposed: bool | None,
) -> torch.Tensor:
    weight = transposed(weight, keep_transposed)
    return _grouped(grad, weight, scale_inv.mT, expert_offsets, MIN_GRADIENT_AMAX)


def _allocate_backward(grad: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[2]), dtype=torch.bfloat16)


_grouped_backward = register(
    "grouped_linear_backward(Tensor grad, Tensor weight, Tensor weight_scale_inv, "
    "Tensor expert_offsets, bool? keep_transposed) -> Tensor",
    reference=_backward,
    fake=_allocate_backward,
    cuda=_backward,
)


def _dgrad(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    expert_offsets: torch.Tensor,
    parts: int,
    keep_transposed: bool | None,
) -> torch.Tensor:
    grad_rows = empty_dgrad(data, scale_inv, weight)
    scales = tile_scales(weight, weight_scale_inv, parts)
    b = transposed(weight, keep_transposed, parts), scales.mT
    m_grouped_fp8_gemm_nt_contiguous((data, scale_inv), b, grad_rows, expert_offsets=expert_offsets)
    return grad_rows


def empty_dgrad(
    data: torch.Tensor, scale_inv: torch.Tensor, weight: torch.Tensor, *_: Any
) -> torch.Tensor:
    k = weight.shape[2]
    shape = data.shape[0], round_up(k, 8)
    return data.new_empty(shape, dtype=torch.bfloat16)[:, :k]


grouped_dgrad = register(
    "grouped_dgrad(Tensor data, Tensor scale_inv, Tensor weight, Tensor weight_scale_inv, "
    "Tensor expert_offsets, int parts, bool? keep_transposed) -> Tensor",
    reference=_dgrad,
    fake=empty_dgrad,
    kernels=_dgrad,
    cuda=_dgrad,
)
"""bf16 [R, K]: rows, quantized to 1x128 already, times the weight of their expert.

data, scale_inv: e4m3 [R, N], or [R, parts * (N / parts rounded up to 128)], and fp32 scales.
weight: e4m3 [E, N, K]; each part of N has its own blocks. Rows of no expert are undefined."""


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: str,
        keep_transposed: bool | None,
        rows: torch.Tensor,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        expert_offsets: torch.Tensor,
    ) -> torch.Tensor:
        ctx.layer, ctx.keep_transposed, ctx.dtype = layer, keep_transposed, rows.dtype
        ctx.save_for_backward(weight, weight_scale_inv, expert_offsets)
        return _grouped(rows, weight, weight_scale_inv, expert_offsets, MIN_AMAX)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_rows, *needed, _ = ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors  # read once: checkpointing unpacks them only once
        grad_weights = no_gradients(grad, ctx.layer, needed, saved[:2])
        grad_rows = None
        if needs_rows:
            grad_rows = _grouped_backward(grad, *saved, ctx.keep_transposed).to(ctx.dtype)
        return None, None, grad_rows, *grad_weights, None


def grouped_linear(
    layer: str,
    rows: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    expert_offsets: torch.Tensor,
    keep_transposed: bool | None = None,
) -> torch.Tensor:
    """bf16 [R, N]: row r is `rows[r] @ W_e.T` for the expert e of r, and zeros if there is none.

    It has a gradient in rows, which is zero for rows of no expert, whatever they hold.

    Args:
        layer: the name in the error that a wanted gradient of the weight raises.
        rows: [R, K] bf16, fp16 or fp32; they are quantized to 1x128.
        weight: e4m3 [E, N, K]. weight_scale_inv: fp32, in any of `FORMATS`.
        expert_offsets: int32 [E + 1], as in `m_grouped_fp8_gemm_nt_contiguous`.
        keep_transposed: see `transposed`.

    Raises TypeError, ValueError as `m_grouped_fp8_gemm_nt_contiguous` does.
    """
    inputs = rows, weight, weight_scale_inv, expert_offsets
    y: torch.Tensor
    if records(layer, *inputs):
        y = _GroupedLinear.apply(layer, keep_transposed, *inputs)
    else:
        y = _grouped(*inputs, MIN_AMAX)
    return y
