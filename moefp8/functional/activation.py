"""`Activation` in PyTorch, forward and backward, and its backward kernel. R rows, I intermediate.

The GEMM of gate and up has the forward in its epilogue; `activation_backward.cu` is the backward.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from ..kernels.common.activation import SWIGLU, Activation
from ..kernels.common.blocks import BLOCK, MIN_GRADIENT_AMAX, round_up, tma_aligned
from ..kernels.common.checks import INPUTS
from ..kernels.jit import Kernel
from ..kernels.program import Codes, Place, Record, Tensor

_UNIT = 8  # elements of BF16, or codes, that a thread loads at once


def activate(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: Activation = SWIGLU,
    *,
    exact: bool = False,
) -> torch.Tensor:
    """The activation of gate and up, in FP32.

    exact: f is computed in FP64 and rounded once. In FP32 a CPU rounds the last few elements of a
        tensor differently, so the bits of a row depend on where the tensor ends.
    """
    gate, up = _clamped(gate.float(), up.float(), activation.limit)
    gated = _gated(gate.double() if exact else gate, activation).float()
    return gated * _factor(up, activation)


def activate_grad(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: Activation = SWIGLU
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of gate and up for `grad`, that of `activate`; and the result of `activate`.

    All are [..., I] in the dtype of `grad`. A clamped gate has gradient 0, and so has a clamped up.
    """
    clamped_gate, clamped_up = _clamped(gate.to(grad.dtype), up.to(grad.dtype), activation.limit)
    gated, slope = _gated_and_slope(clamped_gate, activation)
    factor = _factor(clamped_up, activation)
    grad_gate, grad_up = grad * factor * slope, grad * gated
    if activation.limit is not None:
        grad_gate = grad_gate.masked_fill(gate > activation.limit, 0)
        grad_up = grad_up.masked_fill(up.abs() > activation.limit, 0)
    return grad_gate, grad_up, gated * factor


def _clamped(
    gate: torch.Tensor, up: torch.Tensor, limit: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if limit is None:
        return gate, up
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def _factor(up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """What multiplies f(gate)."""
    return up + 1 if activation.kind == "gpt_oss" else up


def _gated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    """f(gate) of `Activation`."""
    if activation.kind == "swiglu":
        return F.silu(gate)
    return gate * _share(gate, activation)


def _share(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    """f(gate) / gate. It is exact for large negative gates, where PyTorch's GELUs add 1 to -1."""
    kind = activation.kind
    if kind == "geglu":
        return 0.5 * (gate * -math.sqrt(0.5)).erfc()
    if kind == "geglu_tanh":
        return (_TANH_SCALE * (gate + _TANH_CUBIC * gate**3)).sigmoid()
    return _sloped(gate, activation).sigmoid()


def _sloped(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    return gate if activation.slope == 1 else gate * activation.slope


_TANH_SCALE, _TANH_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


def _gated_and_slope(
    gate: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """f(gate), and the derivative of f there.

    With s = sigmoid(z(gate)), f is `gate s`, and its derivative `s (1 + gate z' (1 - s))`. That of
    `gate Phi(gate)` is `Phi(gate) + gate phi(gate)`.
    """
    kind, share = activation.kind, _share(gate, activation)
    if kind == "geglu":
        density = (-0.5 * gate * gate).exp() / math.sqrt(2 * math.pi)
        return gate * share, share + gate * density
    steepness = _sloped(gate, activation)
    if kind == "geglu_tanh":
        near = gate.clamp(-16, 16)  # beyond that, s (1 - s) is 0; gate^3 may be infinite
        steepness = _TANH_SCALE * near * (1 + 3 * _TANH_CUBIC * near * near)
    return gate * share, share * (1 + steepness * (1 - share))


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


def activation_backward_kernel_of(
    activation: Activation, weights_dtype: torch.dtype, *, is_fp8: bool
) -> Kernel:
    arguments = activation.enumerator, INPUTS[weights_dtype], str(is_fp8).lower()
    return Kernel(_SOURCE, f"activation_backward_kernel<{', '.join(arguments)}>")


def describe_activation_backward(
    r: Record,
    grad: Tensor,
    saved: Tensor,
    saved_scales: Tensor | None,
    rows: Codes | None,
    activation: Activation,
    *,
    weights: Tensor | None = None,
    token_to_row: Place | None = None,
    grad_weights: Place | None = None,
    is_first: Place | None = None,
    bf16_rows: Place | None = None,
    weight_of_row: Place | None = None,
) -> None:
    """Add a step to r: the gradients of gate and up, for the choices of all tokens.

    It waits for the previous step.

    Args:
        grad: bf16 [..., R, I] in rows of whole 16 bytes.
        saved: bf16 [R, 2, I] in the layout of `empty_gate_up`, or e4m3 [2 R, I], contiguous.
        saved_scales: fp32 [2 R, ceil(I/128)], rows innermost; None for bf16.
        rows: e4m3 [..., R, 2 * (I rounded up to 128)], contiguous; the padding of each half is
            written as zeros. fp32 scales, rows innermost. None: not written.
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
        "bf16_rows": bf16_rows,
        "bf16_row_bytes": 2 * round_up(size, _COLUMNS),
        "token_to_row": token_to_row,
        "of_weights": grad_weights,
        "is_first": is_first,
        "weight_of_row": weight_of_row,
        "size": size,
        "padded_size": padded_size,
        "activation": activation.arguments,
        "min_amax": MIN_GRADIENT_AMAX,
    }
    if rows is not None:
        arguments |= {
            "rows": rows.data.place,
            "row_pitch": 2 * padded_size,
            "row_scales": rows.scale_inv.place,
            "scale_pitch": rows.scale_inv.strides[-1],
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
        activation_backward_kernel_of(activation, dtype, is_fp8=is_fp8),
        num_choices,
        min(_MAX_THREADS, round_up(padded_size, _WARP_COLUMNS) // _COLUMNS),
        {**arguments, "num_choices": num_choices, "top_k": top_k},
        programmatic=True,
    )
