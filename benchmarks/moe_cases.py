"""What layers of routed experts are timed at: models, their weights, and routed tokens."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from moefp8 import GroupedExperts
from moefp8.kernels import BLOCK, num_blocks
from moefp8.quant import quantize_128x128

FLOOR_TBPS, FLOOR_TFLOPS = 4.3, 1450.0  # about what an H200 copies, and what GEMMs get at best


class Model(NamedTuple):
    title: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def weights_of_expert(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size


MODELS = {
    "qwen3_30b_a3b": Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    "deepseek_v3": Model("DeepSeek-V3", 256, 8, 7168, 2048),
    "mixtral_8x7b": Model("Mixtral 8x7B", 8, 2, 4096, 14336),
}


@torch.no_grad()
def random_experts(model: Model, device: str = "cuda") -> GroupedExperts:
    """Normal weights over the root of their fan-in, quantized one expert at a time."""
    num_experts, h, i = model.num_experts, model.hidden_size, model.intermediate_size
    experts = GroupedExperts(num_experts, h, i, device="meta").to_empty(device=device)
    for expert in range(num_experts):
        for name, shape in (("gate_up_proj", (2, i, h)), ("down_proj", (1, h, i))):
            data, scale_inv = quantize_128x128(torch.randn(shape, device=device) / shape[-1] ** 0.5)
            getattr(experts, name)[expert].copy_(data.flatten(0, 1))
            getattr(experts, f"{name}_scale_inv")[expert].copy_(scale_inv.flatten(0, 1))
    return experts


def values(data: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """What weights [..., N, K] and scales of 128x128 stand for, in FP32."""
    n, k = data.shape[-2:]
    scales = scale_inv.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)
    return data.float() * scales[..., :n, :k]


def dequantized(experts: GroupedExperts, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of one expert: fp32 gate_up [2I, H] and down [H, I]."""
    gate_up = (experts.gate_up_proj[expert], experts.gate_up_proj_scale_inv[expert])
    halves = values(*(part.unflatten(0, (2, -1)) for part in gate_up))
    down = values(experts.down_proj[expert], experts.down_proj_scale_inv[expert])
    return halves.flatten(0, 1), down


@dataclass(frozen=True)
class Case:
    """Tokens x bf16 [T, H], and for each its experts int64 [T, k] and their scores fp32 [T, k]."""

    model: Model
    experts: GroupedExperts
    x: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor

    @classmethod
    def random(cls, model: Model, experts: GroupedExperts, num_tokens: int) -> "Case":
        """Normal tokens and logits; the scores of a token add up to 1."""
        device = experts.down_proj.device
        x = torch.randn(num_tokens, model.hidden_size, device=device).bfloat16()
        scores = torch.randn(num_tokens, model.num_experts, device=device).softmax(dim=-1)
        weights, index = scores.topk(model.top_k, dim=-1)
        return cls(model, experts, x, index, weights / weights.sum(dim=-1, keepdim=True))

    def only(self, tokens: torch.Tensor) -> "Case":
        names = "x", "top_k_index", "top_k_weights"
        return replace(self, **{name: getattr(self, name)[tokens] for name in names})

    def run(self) -> torch.Tensor:
        y: torch.Tensor = self.experts(self.x, self.top_k_index, self.top_k_weights)
        return y

    @property
    def num_active(self) -> int:
        """Experts that have a token."""
        return self.top_k_index.unique().numel()

    @property
    def flops(self) -> int:
        return 2 * self.top_k_index.numel() * self.model.weights_of_expert

    def num_bytes(self, operands: str) -> int:
        """Active weights and their scales read once, x read once, and y written once."""
        num_bytes = self.model.weights_of_expert * (2 if operands == "bf16" else 1)
        if operands == "block_scaled":
            sizes = self.model.hidden_size, self.model.intermediate_size
            num_bytes += 4 * 3 * num_blocks(sizes[0]) * num_blocks(sizes[1])
        return self.num_active * num_bytes + 2 * 2 * self.x.numel()

    @property
    def floor_us(self) -> float:
        """Active weights read once, or all products: whichever takes longer."""
        loads = self.num_active * self.model.weights_of_expert / FLOOR_TBPS
        return max(loads, self.flops / FLOOR_TFLOPS) / 1e6
