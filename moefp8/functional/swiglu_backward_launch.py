"""Describe `swiglu_backward.cu`. T tokens, k choices each, R rows, I intermediate."""

from pathlib import Path
from typing import Any

import torch

from ..kernels.common.blocks import BLOCK, MIN_GRADIENT_AMAX, round_up
from ..kernels.common.checks import INPUTS
from ..kernels.jit import Kernel
from ..kernels.program import Codes, Place, Record, Tensor

_SOURCE = Path(__file__).with_name("swiglu_backward.cu")
_MAX_THREADS, _WARP_COLUMNS, _COLUMNS = 128, 256, 8


def kernel_of(weights_dtype: torch.dtype, *, is_fp8: bool) -> Kernel:
    flag = str(is_fp8).lower()
    return Kernel(_SOURCE, f"swiglu_backward_kernel<{INPUTS[weights_dtype]}, {flag}>")


def describe_swiglu_backward(
    r: Record,
    grad: Tensor,
    saved: Tensor,
    saved_scales: Tensor | None,
    rows: Codes,
    limit: float,
    *,
    weights: Tensor | None = None,
    token_to_row: Place | None = None,
    grad_weights: Place | None = None,
    is_first: Place | None = None,
    bf16_rows: Place | None = None,
    weight_of_row: Place | None = None,
) -> None:
    """One step: the gradients of gate and up in E4M3, for the choices of all tokens.

    It waits for the step before it.

    Args:
        grad: bf16 [..., R, I] in rows of whole 16 bytes.
        saved: bf16 [R, 2, I] as `empty_gate_up` says, or e4m3 [2 R, I], contiguous.
        saved_scales: fp32 [2 R, ceil(I/128)], rows innermost; None for bf16.
        rows: e4m3 [..., R, 2 * (I rounded up to 128)], contiguous, where what follows the I of each
            half becomes zeros; fp32 scales, rows innermost.
        limit: that of `swiglu`; infinite if there is none.
        weights: [T, k]. None: there are R rows of one token each, and of the places that follow
            only `bf16_rows` may be given; else the first three must be.
        token_to_row: int32 [T, k], contiguous.
        grad_weights: fp32 [T, k], the gradients of `weights`.
        is_first: fp32 [T, k], 1 for the first choice of each row and 0 for others.
        bf16_rows: bf16 [R, 2, I], with the layout that `saved` has in bf16: the gradients before
            they are quantized.
        weight_of_row: fp32 [R], the sum of the weights of all choices of a row.
    """
    is_fp8, size = saved_scales is not None, saved.shape[-1]
    padded_size = round_up(size, BLOCK)
    dtype, num_choices, top_k = torch.float32, saved.shape[0] // (2 if is_fp8 else 1), 1
    arguments: dict[str, Any] = {
        "grad": grad.place,
        "grad_row_bytes": grad.bytes_of_stride(-2),
        "saved": saved.place,
        "saved_row_bytes": saved.bytes_of_stride(-2),
        "rows": rows.data.place,
        "row_pitch": 2 * padded_size,
        "row_scales": rows.scale_inv.place,
        "scale_pitch": rows.scale_inv.strides[-1],
        "bf16_rows": bf16_rows,
        "bf16_row_bytes": 2 * round_up(size, _COLUMNS),
        "token_to_row": token_to_row,
        "of_weights": grad_weights,
        "is_first": is_first,
        "weight_of_row": weight_of_row,
        "size": size,
        "padded_size": padded_size,
        "limit": limit,
        "min_amax": MIN_GRADIENT_AMAX,
    }
    if saved_scales is not None:
        arguments["saved_scales"] = saved_scales.place
        arguments["saved_scale_pitch"] = saved_scales.strides[-1]
    if weights is not None:
        dtype, (num_tokens, top_k) = weights.dtype, weights.shape
        num_choices = num_tokens * top_k
        arguments |= {
            "weights": weights.place,
            "weight_token_bytes": weights.bytes_of_stride(0),
            "weight_choice_bytes": weights.bytes_of_stride(1),
        }
    r.step(
        kernel_of(dtype, is_fp8=is_fp8),
        num_choices,
        min(_MAX_THREADS, round_up(padded_size, _WARP_COLUMNS) // _COLUMNS),
        {**arguments, "num_choices": num_choices, "top_k": top_k},
        programmatic=True,
    )
