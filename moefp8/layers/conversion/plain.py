"""`PlainExperts`: what `GroupedExperts` is without FP8, in plain PyTorch.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from ...functional.experts import swiglu
from ...kernels.common.checks import check_choices


class PlainExperts(nn.Module):
    """E SwiGLU experts in BF16, FP16 or FP32: what `dequantize` makes of `GroupedExperts`.

    Names, shapes and forward are the same, and gradients flow; experts run one after the other,
    and on a GPU each waits for the router's choice. `convert` makes `GroupedExperts` of it.

    Args:
        num_experts, hidden_size, intermediate_size: E, H and I.
        swiglu_limit: as in `GroupedExperts`.
        device, dtype: of the weights.

    Attributes:
        gate_up_proj: [E, 2I, H], gate rows first.
        down_proj: [E, H, I].
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        swiglu_limit: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.swiglu_limit = swiglu_limit
        gate_up, down = (
            torch.empty(num_experts, *shape, device=device, dtype=dtype)
            for shape in ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size))
        )
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every projection as `nn.Linear` does."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(max(weight.shape[2], 1))
            weight.uniform_(-bound, bound)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run every token through its experts, in the dtype of the weights; the sum is in FP32.

        hidden_states [T, H], top_k_index [T, k] in [0, E] and top_k_weights [T, k] -> [T, H] in
        the dtype of hidden_states, all as in `GroupedExperts`.
        """
        if top_k_index.device.type == "cpu":
            check_choices("PlainExperts", top_k_index, self.num_experts)
        x = hidden_states.to(self.down_proj.dtype)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            if len(token):
                activated = self._apply_gate(F.linear(x[token], self.gate_up_proj[expert]))
                rows = F.linear(activated, self.down_proj[expert]).float()
                y.index_add_(0, token, rows * top_k_weights[token, choice, None].float())
        return y.to(hidden_states.dtype)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[R, 2I] -> [R, I]; by this name, transformers and `convert` know it."""
        gate, up = gate_up.chunk(2, dim=-1)
        return swiglu(gate, up, self.swiglu_limit).to(gate_up.dtype)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, swiglu_limit={self.swiglu_limit}"
        )
