"""SwiGLU in PyTorch, forward and backward, and its backward kernel. R rows, I intermediate.

The GEMM of gate and up has the forward in its epilogue; `activation_backward.cu` is the backward.
"""

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from ..kernels.common.blocks import BLOCK, MIN_GRADIENT_AMAX, round_up, tma_aligned
from ..kernels.common.checks import INPUTS
from ..kernels.jit import Kernel
from ..kernels.program import Codes, Place, Record, Tensor

_UNIT = 8  # elements of BF16, or codes, that a thread loads at once


def activate(
    gate: torch.Tensor, up: torch.Tensor, limit: float | None = None, *, exact: bool = False
) -> torch.Tensor:
    """`silu(gate) * up` in FP32; `limit` clamps gate from above, and up on both sides.

    exact: silu is computed in FP64 and rounded once. In FP32 a CPU rounds the last few elements of
        a tensor differently, so the bits of a row depend on where the tensor ends.
    """
    gate, up = gate.float(), up.float()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (F.silu(gate.double()).float() if exact else F.silu(gate)) * up


def activate_grad(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, limit: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of gate and up for `grad`, that of `activate`; and the result of `activate`.

    All are [..., I] in the dtype of `grad`. With s the sigmoid of gate, the derivative of silu is
    `s * (1 + gate * (1 - s))`. A clamped gate has gradient 0, and so has a clamped up.
    """
    gate_is_held = up_is_held = torch.zeros((), dtype=torch.bool, device=grad.device)
    gate, up = gate.to(grad.dtype), up.to(grad.dtype)
    if limit is not None:
        gate_is_held, up_is_held = gate > limit, up.abs() > limit
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    grad_gate = (grad * up * slope).masked_fill(gate_is_held, 0)
    return grad_gate, (grad * silu).masked_fill(up_is_held, 0), silu * up


def check_limit(op: str, swiglu_limit: float | None) -> None:
    if swiglu_limit is not None and not swiglu_limit >= 0:
        raise ValueError(f"{op}: swiglu_limit must be at least 0, or None, got {swiglu_limit}")


def empty_gate_up(like: torch.Tensor, num_rows: int, size: int) -> torch.Tensor:
    """Memory for gate and up of each row, saved for a backward: bf16 [R, 2, I].

    Rows of I begin at multiples of 16 bytes.
    """
    shape = num_rows, 2, round_up(size, _UNIT)
    return like.new_empty(shape, dtype=torch.bfloat16)[..., :size]


def in_saved_layout(gate_up: torch.Tensor) -> torch.Tensor:
    """bf16 [R, 2, I] itself if it has the layout of `empty_gate_up`, else a copy that has.

    Hooks on saved tensors, such as those that offload them to the CPU, may give other strides.
    """
    num_rows, _, size = gate_up.shape
    if has_saved_layout(gate_up):
        return gate_up
    return empty_gate_up(gate_up, num_rows, size).copy_(gate_up)


def has_saved_layout(gate_up: torch.Tensor) -> bool:
    if gate_up.ndim != 3:
        return False
    (num_rows, _, size), (step, pitch, one) = gate_up.shape, gate_up.stride()
    is_aligned = gate_up.data_ptr() % 16 == pitch % _UNIT == 0 and pitch >= size
    return is_aligned and (one == 1 or size == 1) and (step == 2 * pitch or num_rows == 1)


def readable_saved(
    gate_up: torch.Tensor, scale_inv: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gate and up that a forward saved, copied if kernels cannot read their layout.

    Returns bf16 in the layout of `empty_gate_up` if scale_inv is None; else e4m3 [2 R, I],
    contiguous and at a multiple of 8 bytes, and fp32 [2 R, I/128], rows innermost.
    """
    if scale_inv is None:
        return in_saved_layout(gate_up), None
    if not _are_readable_codes(gate_up):
        gate_up = gate_up.clone(memory_format=torch.contiguous_format)
    return gate_up, scale_inv if scale_inv.stride(0) == 1 else tma_aligned(scale_inv)


def is_readable(gate_up: torch.Tensor, scale_inv: torch.Tensor | None) -> bool:
    """Whether kernels can read the layout, so that `readable_saved` copies nothing."""
    if scale_inv is None:
        return has_saved_layout(gate_up)
    return _are_readable_codes(gate_up) and scale_inv.stride(0) == 1


def _are_readable_codes(gate_up: torch.Tensor) -> bool:
    return gate_up.is_contiguous() and gate_up.data_ptr() % _UNIT == 0


# ---- The kernel of a backward ----

_SOURCE = Path(__file__).with_name("activation_backward.cu")
_MAX_THREADS, _WARP_COLUMNS, _COLUMNS = 128, 256, 8


def activation_backward_kernel_of(weights_dtype: torch.dtype, *, is_fp8: bool) -> Kernel:
    flag = str(is_fp8).lower()
    return Kernel(_SOURCE, f"activation_backward_kernel<{INPUTS[weights_dtype]}, {flag}>")


def describe_activation_backward(
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
    """Add a step to r: the gradients of gate and up in E4M3, for the choices of all tokens.

    It waits for the previous step.

    Args:
        grad: bf16 [..., R, I] in rows of whole 16 bytes.
        saved: bf16 [R, 2, I] in the layout of `empty_gate_up`, or e4m3 [2 R, I], contiguous.
        saved_scales: fp32 [2 R, ceil(I/128)], rows innermost; None for bf16.
        rows: e4m3 [..., R, 2 * (I rounded up to 128)], contiguous; the padding of each half is
            written as zeros. fp32 scales, rows innermost.
        limit: of `activate`; infinite if there is none.
        weights: [T, k]; the next three arguments are then required. None: each row is of one token,
            and of the arguments below only `bf16_rows` is allowed.
        token_to_row: int32 [T, k], contiguous.
        grad_weights: fp32 [T, k], the gradients of `weights`.
        is_first: fp32 [T, k], 1 for the first choice of each row and 0 for others.
        bf16_rows: bf16 [R, 2, I] in the layout of `empty_gate_up`: the gradients, not quantized.
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
        activation_backward_kernel_of(dtype, is_fp8=is_fp8),
        num_choices,
        min(_MAX_THREADS, round_up(padded_size, _WARP_COLUMNS) // _COLUMNS),
        {**arguments, "num_choices": num_choices, "top_k": top_k},
        programmatic=True,
    )
