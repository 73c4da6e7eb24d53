"""SwiGLU in PyTorch, forward and backward. R rows, I intermediate.

The GEMM of gate and up has the forward in its epilogue; `swiglu_backward.cu` is the backward.
"""

import torch
from torch.nn import functional as F

from ..kernels.common.blocks import round_up


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """`silu(gate) * up` in FP32; `limit` clamps gate from above, and up on both sides."""
    gate, up = gate.float(), up.float()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return F.silu(gate) * up


def swiglu_grad(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, limit: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of gate and up, where `swiglu` has the gradient `grad`, and what it gave.

    All are [..., I] in the dtype of `grad`. With s the sigmoid of gate, the derivative of silu is
    `s * (1 + gate * (1 - s))`. Where the limit holds there is no gradient.
    """
    gate_is_held = up_is_held = torch.zeros((), dtype=torch.bool, device=grad.device)
    gate, up = gate.to(grad.dtype), up.to(grad.dtype)
    if limit is not None:
        gate_is_held, up_is_held = gate > limit, up.abs() > limit
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    of_gate = (grad * up * slope).masked_fill(gate_is_held, 0)
    return of_gate, (grad * silu).masked_fill(up_is_held, 0), silu * up


def check_limit(op: str, swiglu_limit: float | None) -> None:
    if swiglu_limit is not None and not swiglu_limit >= 0:
        raise ValueError(f"{op}: swiglu_limit must be at least 0, or None, got {swiglu_limit}")


def empty_gate_up(like: torch.Tensor, num_rows: int, size: int) -> torch.Tensor:
    """Memory for gate and up of each row, which a backward takes: bf16 [R, 2, I].

    Rows of I begin at multiples of 16 bytes.
    """
    shape = num_rows, 2, round_up(size, 8)
    return like.new_empty(shape, dtype=torch.bfloat16)[..., :size]
