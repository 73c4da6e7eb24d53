"""Drop `GroupedExperts` into a hand-written MoE transformer block.

python examples/moe_block.py
"""

import torch
from torch import nn

from moefp8 import GroupedExperts, TopKRouter
from moefp8.testing import reference_model, relative_error


class MoEBlock(nn.Module):
    """Attention, then experts; router and experts are ours, the rest is plain PyTorch."""

    def __init__(self, hidden_size: int = 512, num_experts: int = 16, top_k: int = 4) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)
        self.attention = nn.MultiheadAttention(hidden_size, 8, batch_first=True, bias=False)
        self.router = TopKRouter(hidden_size, num_experts, top_k)
        self.experts = GroupedExperts(num_experts, hidden_size, intermediate_size=768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        tokens = self.moe_norm(x).flatten(0, 1)  # [B, S, H] -> [T, H]
        return x + self.experts(tokens, *self.router(tokens)).view_as(x)


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    block = MoEBlock().bfloat16()  # weights, scales and the router keep their dtypes
    x = torch.randn(2, 64, 512, dtype=torch.bfloat16)
    y = block(x)
    print(block)
    print(f"output {list(y.shape)} {y.dtype}")

    tokens = x.flatten(0, 1)
    routing = block.router(tokens)
    experts = block.experts(tokens, *routing)
    for quantized in (True, False):
        error = relative_error(experts, reference_model(block.experts, quantized)(tokens, *routing))
        kind = "FP8" if quantized else "BF16"
        print(f"worst token of the experts, against FP32 sums of {kind} activations: {error:.4f}")


if __name__ == "__main__":
    main()
