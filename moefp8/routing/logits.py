"""The router's logits in PyTorch, and when a Hopper GPU has a kernel for them."""

from typing import Any

import torch
from torch.nn import functional as F

from . import logits_launch
from .top_k_launch import MAX_EXPERTS


def exact_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [T, E] by a product in FP64, which no setting of FP32 matmuls changes."""
    return F.linear(x.double(), weight.double()).float()


def route_takes(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> bool:
    """Whether `route` has kernels for them; for other arguments PyTorch runs, without a warning."""
    return logits_launch.takes(x, weight) and 0 < len(weight) <= MAX_EXPERTS
