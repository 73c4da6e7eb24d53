"""Gradients of weights whose inputs a forward saves: their formats and their products."""

from typing import Literal, get_args

import torch

from ...kernels.gemm.k_grouped import k_grouped_gemm
from ...kernels.registry import without_autocast
from . import main_grad

Wgrad = Literal["128x1", "128x128", "bf16"]
"""The format in which inputs are saved for gradients of weights: FP8 with a scale for 128 tokens of
one feature or of 128 features, or BF16; in BF16 the gradient of the result stays BF16, too."""


def check_wgrad(layer: str, wgrad: str) -> None:
    if wgrad not in get_args(Wgrad):
        raise ValueError(f"{layer}: wgrad must be '128x1', '128x128' or 'bf16', got {wgrad!r}")


ColumnCodes = tuple[torch.Tensor, torch.Tensor]  # column codes and their scales


def nothing_of(x: torch.Tensor) -> ColumnCodes:
    """Empty tensors in place of column codes that are not needed."""
    return x.new_empty(0, dtype=torch.float8_e4m3fn), x.new_empty(0, dtype=torch.float32)


def weight_gradient(
    weight: torch.Tensor,
    grad_columns: ColumnCodes,
    x_columns: ColumnCodes,
    num_tokens: int,
    expert_offsets: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Compute dY^T X, and what a backward returns for the weight: see `main_grad`.

    weight: [N, K], or [E, N, K] with expert_offsets.
    grad_columns, x_columns: column codes of dY and of X.
    """
    d, accumulates = main_grad.target(weight)
    written = as_written(d)
    k_grouped_gemm(*grad_columns, *x_columns, written, expert_offsets, num_tokens, accumulates)
    return main_grad.result(weight, d if written is d else d.copy_(written))


def as_written(d: torch.Tensor) -> torch.Tensor:
    """d itself, or FP32 memory in its place if the GEMM cannot write its dtype."""
    return torch.empty_like(d, dtype=torch.float32) if d.dtype == torch.float16 else d


def bf16_gradient(weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """`weight_gradient` of weight [N, K], by PyTorch's product of BF16 grad [M, N] and x [M, K]."""
    with without_autocast(grad.device):
        product = grad.bfloat16().T @ x.bfloat16()
    return put(weight, product)


def put(weight: torch.Tensor, product: torch.Tensor, *, begins: bool = True) -> torch.Tensor | None:
    """Write or add a product to the target of the weight's gradient; begins: see `main_grad`."""
    d, accumulates = main_grad.target(weight, begins=begins)
    return main_grad.result(weight, d.add_(product) if accumulates else d.copy_(product))
