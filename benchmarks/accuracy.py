"""How far FP8 layers are from exact sums and from BF16: `python -m benchmarks.accuracy`.

Weights and activations are normal; it prints the worst and median relative error of rows (tokens).
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.circumstances import circumstances
from moefp8 import FP8Linear, GroupedExperts, TopKRouter
from moefp8.quant import BlockScaled, dequantize, quantize_1x128
from moefp8.testing import reference_model, row_errors

NUM_TOKENS = 256


@torch.inference_mode()
def linear_errors() -> dict[str, torch.Tensor]:
    """7168 -> 2048, DeepSeek-V3's gate of one expert."""
    linear = nn.Linear(7168, 2048, bias=False).bfloat16()
    ours, x = FP8Linear.from_linear(linear), torch.randn(NUM_TOKENS, 7168).bfloat16()
    weight = dequantize(BlockScaled(ours.weight, ours.weight_scale_inv)).double()
    exact = dequantize(quantize_1x128(x)).double() @ weight.T
    y = ours(x)
    return {
        "FP8Linear against FP64 sums of the same FP8 operands": row_errors(y, exact),
        "FP8Linear against nn.Linear in BF16": row_errors(y, linear(x)),
    }


@torch.inference_mode()
def layer_errors() -> dict[str, torch.Tensor]:
    """16 experts of Qwen3-30B-A3B's sizes, 8 per token."""
    num_experts, hidden_size, intermediate_size = 16, 2048, 768
    shape = num_experts, 2 * intermediate_size, hidden_size
    gate_up = (torch.randn(shape) * 0.02).bfloat16()
    down = (torch.randn(num_experts, hidden_size, intermediate_size) * 0.02).bfloat16()
    ours = GroupedExperts.from_weights(gate_up, down)
    x = torch.randn(NUM_TOKENS, hidden_size).bfloat16()
    index, weights = TopKRouter(hidden_size, num_experts, 8)(x)
    in_bf16 = torch.zeros(NUM_TOKENS, hidden_size)
    for expert in range(num_experts):
        tokens, choices = torch.where(index == expert)
        gate, up = (x[tokens] @ gate_up[expert].T).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ down[expert].T
        in_bf16[tokens] += weights[tokens, choices, None] * y.float()
    y, exact = ours(x, index, weights), reference_model(ours)(x, index, weights)
    return {
        "GroupedExperts against its reference, rounded to BF16 as it is": row_errors(y, exact),
        "GroupedExperts against experts in BF16": row_errors(y, in_bf16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = {
        name: {"worst": float(errors.max()), "median": float(errors.median())}
        for name, errors in {**linear_errors(), **layer_errors()}.items()
    }
    for name, result in results.items():
        print(f"{name:58} worst {result['worst']:.1e}   median {result['median']:.1e}")
    if options.json:
        found = json.dumps({**circumstances(), "relative_error_of_rows": results}, indent=2)
        options.json.write_text(found + "\n")


if __name__ == "__main__":
    main()
