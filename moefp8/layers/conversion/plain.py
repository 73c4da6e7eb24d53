"""`PlainExperts`: what `GroupedExperts` is without FP8, in plain PyTorch.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ...functional.activation import activate
from ...functional.expert_biases import bias_shapes
from ...kernels.common.activation import Activation, activation_of
from ...kernels.common.checks import check_choices
from ..module import attributes_repr, draw_as_linear


class PlainExperts(nn.Module):
    """E gated experts in BF16, FP16 or FP32: `dequantize` makes them, `convert` takes them.

    Names, shapes and forward are those of `GroupedExperts`, and gradients flow. Experts run one
    after the other, and on a GPU each waits for the router's choice. `dtype` is that of the weights
    gate_up_proj [E, 2I, H] and down_proj [E, H, I], and of the biases gate_up_proj_bias [E, 2I] and
    down_proj_bias [E, H], or None.
    """

    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    expert_offset = 0  # these two as in `GroupedExperts`
    num_global_experts: int | None = None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "swiglu",
        swiglu_limit: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        bias: bool = False,
    ) -> None:
        super().__init__()
        e, h, i = num_experts, hidden_size, intermediate_size
        self.num_experts, self.hidden_size, self.intermediate_size = e, h, i
        self.activation = activation_of("PlainExperts", activation, swiglu_limit)
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, h, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(e, h, i, device=device, dtype=dtype))
        for name, shape in bias_shapes(e, h, i).items():
            made = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if bias else None
            self.register_parameter(name, made)
        self.reset_parameters()

    @property
    def swiglu_limit(self) -> float | None:
        """The limit of `activation`."""
        return self.activation.limit

    @swiglu_limit.setter
    def swiglu_limit(self, limit: float | None) -> None:
        self.activation = self.activation._replace(limit=limit)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every projection as `nn.Linear` does."""
        biases = self.gate_up_proj_bias, self.down_proj_bias
        for weight, bias in zip((self.gate_up_proj, self.down_proj), biases, strict=True):
            for x in (weight, bias):
                if x is not None:
                    draw_as_linear(x, weight.shape[2])

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run tokens [T, H] as `GroupedExperts` does, in the dtype of the weights; sum in FP32."""
        if top_k_index.device.type == "cpu":
            num_experts = self.num_global_experts or self.num_experts
            check_choices("PlainExperts", top_k_index, num_experts)
        x = hidden_states.to(self.down_proj.dtype)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == self.expert_offset + expert)
            if len(token):
                gate_up_bias, down_bias = (
                    None if bias is None else bias[expert]
                    for bias in (self.gate_up_proj_bias, self.down_proj_bias)
                )
                gate_up = F.linear(x[token], self.gate_up_proj[expert], gate_up_bias)
                activated = self._apply_gate(gate_up)
                rows = F.linear(activated, self.down_proj[expert], down_bias).float()
                y.index_add_(0, token, rows * top_k_weights[token, choice, None].float())
        return y.to(hidden_states.dtype)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2I] -> [rows, I]; transformers and `convert` know it by this name."""
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate, up, self.activation).to(gate_up.dtype)

    def extra_repr(self) -> str:
        sizes = "num_experts", "hidden_size", "intermediate_size"
        activation = () if self.activation.kind == "swiglu" else ("activation",)
        has_bias = self.down_proj_bias is not None or self.gate_up_proj_bias is not None
        text = attributes_repr(self, *sizes, *activation, "swiglu_limit")
        return text + (", bias=True" if has_bias else "")
