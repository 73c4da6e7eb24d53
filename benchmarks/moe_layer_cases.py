"""What whole MoE layers are timed at: routers, experts and shared experts of models, and tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.moe_accuracy import COMPARED_TOKENS, reference
from benchmarks.moe_cases import MODELS, Case, Model, random_experts, values
from moefp8 import MoE, TopKRouter
from moefp8.quant import quantize_128x128
from moefp8.testing import relative_error

TOKENS = 1, 16, 128, 1024, 4096
# What `MoE` is given beside the sizes in `MODELS`.
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b": {},
    "deepseek_v3": {
        "shared_intermediate_size": 2048,
        "scoring": "sigmoid",
        "num_groups": 8,
        "topk_groups": 4,
        "scaling_factor": 2.5,
        "correction_bias": True,
    },
}
Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # x -> index, weights


@torch.no_grad()
def random_moe(name: str, device: str = "cuda") -> MoE:
    """Normal weights over the root of their fan-in, and a small bias."""
    _, num_experts, top_k, h, i = model = MODELS[name]
    with torch.device("meta"):
        moe = MoE(h, i, num_experts, top_k, **OPTIONS[name])
    moe.experts = random_experts(model, device)
    moe.gate.to_empty(device=device)
    moe.gate.weight.normal_(std=h**-0.5)
    if moe.gate.e_score_correction_bias is not None:
        moe.gate.e_score_correction_bias.normal_(std=0.01)
    if moe.shared_experts is not None:
        for linear in moe.shared_experts.to_empty(device=device).children():
            weight = torch.randn(linear.weight.shape, device=device)
            data, scale_inv = quantize_128x128(weight / weight.shape[1] ** 0.5)
            linear.weight.copy_(data)
            linear.weight_scale_inv.copy_(scale_inv)
    return moe


def torch_router(gate: TopKRouter, dtype: torch.dtype = torch.float32) -> Router:
    """The choice as PyTorch's operations make it, of FP32 logits of FP32 tokens.

    By sigmoid, the groups whose two best experts have the highest sum are chosen first.
    """
    weight, bias, top_k = gate.weight.to(dtype), gate.e_score_correction_bias, gate.top_k

    def by_softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, index = logits.softmax(dim=-1).topk(top_k, dim=-1)
        return index, scores / scores.sum(dim=-1, keepdim=True)

    def by_sigmoid(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.sigmoid()
        wanted = scores if bias is None else scores + bias
        groups = wanted.unflatten(1, (gate.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(gate.topk_groups, dim=-1).indices
        is_open = torch.zeros_like(groups[..., 0]).scatter_(1, best, 1.0).bool()
        open_groups = groups.masked_fill(~is_open[..., None], float("-inf"))
        index = open_groups.flatten(1).topk(top_k, dim=-1, sorted=False).indices
        chosen = scores.gather(1, index)
        return index, chosen / chosen.sum(dim=-1, keepdim=True) * gate.scaling_factor

    choose = by_softmax if gate.scoring == "softmax" else by_sigmoid
    return lambda x: choose(F.linear(x.to(dtype), weight))


@dataclass(frozen=True)
class Layer:
    """A whole MoE, and tokens x bf16 [T, H]."""

    model: Model
    moe: MoE
    x: torch.Tensor

    @classmethod
    def random(cls, model: Model, moe: MoE, num_tokens: int) -> "Layer":
        device = moe.experts.down_proj.device
        x = torch.randn(num_tokens, model.hidden_size, device=device).bfloat16()
        return cls(model, moe, x)

    def with_other_tokens(self) -> "Layer":
        return self.random(self.model, self.moe, len(self.x))

    def errors(self, results: dict[str, torch.Tensor]) -> dict[str, float]:
        """Relative errors at up to 64 tokens, against FP32 with the same FP8 weights."""
        num_tokens = len(self.x)
        at = torch.linspace(0, num_tokens - 1, min(num_tokens, COMPARED_TOKENS)).long()
        at = at.to(self.x.device)
        exact = self._exact(self.x[at]).flatten()
        errors = {name: relative_error(y[at].flatten(), exact) for name, y in results.items()}
        return {name: float(f"{error:.4g}") for name, error in errors.items()}

    def _exact(self, x: torch.Tensor) -> torch.Tensor:
        index, weights = torch_router(self.moe.gate, torch.float64)(x)
        y = reference(Case(self.model, self.moe.experts, x, index, weights.float()))
        if self.moe.shared_experts is not None:
            gate, up, down = (
                values(linear.weight, linear.weight_scale_inv)
                for linear in self.moe.shared_experts.children()
            )
            y += (F.silu(x.float() @ gate.T) * (x.float() @ up.T)) @ down.T
        return y

    def agreement(self, index: torch.Tensor) -> float:
        """The share of tokens that have the same experts as in FP64."""
        exact, _ = torch_router(self.moe.gate, torch.float64)(self.x)
        same = exact.sort(dim=1).values == index.sort(dim=1).values
        return round(float(same.all(dim=1).float().mean()), 4)
