"""`LoRA`: a product of low rank beside a weight. N out, K in, r rank, E experts, R rows."""

import math

import torch
from torch import nn

from ..kernels.registry import without_autocast
from ..layers.adapter import Adapter
from ..layers.module import attributes_repr, draw_as_linear


class LoRA(Adapter):
    """`scaling * B @ A`, added to a weight [N, K] or to the weights [E, N, K] of experts.

    The sum of weights is never made: `forward` adds `scaling * B (A x)` to what the weight gave.

    Args:
        shape: that of the weight.
        rank, alpha: `scaling` is alpha / rank; with use_rslora, alpha / sqrt(rank).

    Attributes:
        A: [r, K] or [E, r, K], drawn as `nn.Linear` draws its weight, and as PEFT does.
        B: [N, r] or [E, N, r], zeros at first.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        rank: int,
        alpha: float,
        *,
        use_rslora: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        *experts, n, k = shape
        self.rank, self.alpha, self.use_rslora = rank, alpha, use_rslora
        self.scaling = alpha / (math.sqrt(rank) if use_rslora else rank)
        self.A = nn.Parameter(torch.empty(*experts, rank, k, device=device, dtype=dtype))
        self.B = nn.Parameter(torch.empty(*experts, n, rank, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        draw_as_linear(self.A, self.A.shape[-1])
        self.B.zero_()

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y + scaling * B (A x), in the shape and dtype of y, the weight's product with x.

        x: [..., K]; y: [..., N]. A and B are cast to the dtype of y, and so is A x, also under
        autocast, whose FP16 would not hold all of BF16. This is for linears;
        experts.py is for the adapters of experts.
        """
        a, b, x = self.A.to(y.dtype), self.B.to(y.dtype), x.to(y.dtype)
        x_rows, y_rows = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        with without_autocast(y.device):
            total = torch.addmm(y_rows, x_rows @ a.t(), b.t(), alpha=self.scaling)
        return total.view(y.shape)

    def extra_repr(self) -> str:
        shape = (*self.B.shape[:-1], self.A.shape[-1])
        return f"{shape}, {attributes_repr(self, 'rank', 'alpha', 'use_rslora')}"
