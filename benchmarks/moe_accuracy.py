"""How far layers of routed experts are from one in FP32 that has the same FP8 weights."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from benchmarks.moe_cases import Case, dequantized
from benchmarks.moe_peers import PEERS
from moefp8.testing import relative_error
from moefp8.testing.reference import rounded_to_fp8

COMPARED_TOKENS = 64


def reference(
    case: Case, rounded: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float
) -> torch.Tensor:
    """The layer in FP32, one expert after the other: fp32 [T, H].

    `rounded` gives x, and what gate and up make of it, as fp32 numbers.
    """
    x, y = rounded(case.x), torch.zeros(case.x.shape, device=case.x.device)
    for expert in case.top_k_index.unique().tolist():
        tokens, choices = torch.where(case.top_k_index == expert)
        gate_up, down = dequantized(case.experts, expert)
        gate, up = (x[tokens] @ gate_up.T).chunk(2, dim=-1)
        rows = rounded(F.silu(gate) * up) @ down.T
        y.index_add_(0, tokens, case.top_k_weights[tokens, choices, None] * rows)
    return y


def accuracy(case: Case, results: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """The errors of each of `results`, at up to 64 tokens with the first and the last among them.

    error: that of all these tokens as one vector, relative; worst_row: that of the worst of them.
    fp8_error: the former, against the computation that rounds activations to FP8 as well.
    """
    num_tokens, device = len(case.x), case.x.device
    at = torch.linspace(0, num_tokens - 1, min(num_tokens, COMPARED_TOKENS)).long().to(device)
    some = case.only(at)
    exact, of_fp8 = reference(some), reference(some, rounded_to_fp8)
    found: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        y = result[at]
        found[name] = {
            "error": relative_error(y.flatten(), exact.flatten()),
            "worst_row": relative_error(y, exact),
        }
        if PEERS[name].operands == "block_scaled":
            found[name]["fp8_error"] = relative_error(y.flatten(), of_fp8.flatten())
    return {
        name: {key: float(f"{error:.4g}") for key, error in errors.items()}
        for name, errors in found.items()
    }
