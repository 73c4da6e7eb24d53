"""Swap the linears of a plain PyTorch model for `FP8Linear`: one call.

python examples/swap_linears.py
"""

import torch
from torch import nn

import moefp8
from moefp8.testing import relative_error


class FeedForward(nn.Module):
    """A feed-forward block of anyone's own."""

    def __init__(self, hidden_size: int = 512, intermediate_size: int = 1400) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(), FeedForward(), nn.Linear(512, 1000)).bfloat16()
    x = torch.randn(32, 512, dtype=torch.bfloat16)
    before = model(x)
    size_before = sum(p.numel() * p.element_size() for p in model.parameters())

    moefp8.convert(model, skip=["2"])  # in place; the last layer stays in BF16

    size_after = sum(p.numel() * p.element_size() for p in model.parameters())
    print(model)
    print(f"worst row against BF16: {relative_error(model(x), before):.3f}")
    print(f"weights: {size_before / 2**20:.1f} -> {size_after / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
