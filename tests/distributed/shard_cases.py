"""What the tests of `shard` share: modules, choices of their experts, and what parts sum up to."""

import copy

import torch
from torch import nn

import moefp8
import moefp8.hf
from moefp8 import FP8Linear, GroupedExperts
from moefp8.testing import row_errors

E, H, K = 6, 256, 3
BF16 = torch.bfloat16


def parts(module: nn.Module, kind: str, num_ranks: int) -> list[nn.Module]:
    """What each rank keeps of a filled module."""
    copies = [copy.deepcopy(module) for _ in range(num_ranks)]
    return [moefp8.shard(x, {"": kind}, rank, num_ranks) for rank, x in enumerate(copies)]


def make(what: str, size: int, other: int = 130) -> nn.Module:
    """A module whose axes that are cut have `size`: ours, or experts of transformers in BF16."""
    if what in ("linear", "fp8"):
        linear = nn.Linear(size, size, dtype=BF16)
        return linear if what == "linear" else FP8Linear.from_linear(linear)
    if what == "grouped":
        return GroupedExperts(E, other, size)
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=other, moe_intermediate_size=size, num_experts=E)
    config._experts_implementation = what
    experts = Qwen3MoeExperts(config).to(BF16).requires_grad_(False)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=1 / 16)
    return experts


def assert_sums_up(outputs: list[torch.Tensor], wanted: torch.Tensor, bound: float) -> None:
    """`bound` is the error of the worst row.

    Each rank rounds to BF16 once (2**-9 of its own values), and where a block of activations is
    split, quantizes its share by a maximum of its own (up to 2**-4 of a value, a few percent of a
    row of few).
    """
    total = torch.stack([y.double() for y in outputs]).sum(0)
    assert row_errors(total, wanted.double()).max() < bound
    without_one = total - outputs[-1].double()
    assert row_errors(without_one, wanted.double()).max() > 4 * bound  # the bound can be missed


def choices(
    num_tokens: int, num_experts: int = E, top_k: int = K
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices among the experts of the whole model; some are of an expert that is nobody's."""
    scores = torch.rand(num_tokens, num_experts)
    weights, index = scores.topk(top_k)
    return index.masked_fill(torch.rand(num_tokens, top_k) < 0.1, num_experts), weights
