"""Layers of experts that ranks share, and what a rank is given of one."""

from typing import NamedTuple

import torch

from moefp8 import GroupedExperts


class Layer(NamedTuple):
    """E experts, k choices, H hidden, I intermediate."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


LAYERS = (
    Layer("DeepSeek-V3", 256, 8, 7168, 2048),
    Layer("Qwen3-30B-A3B", 128, 8, 2048, 768),
)
TOKENS = 16, 128, 1024, 4096, 16384  # of each rank

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden states, ids, scores


def experts_of(layer: Layer) -> GroupedExperts:
    """All experts, of random weights, the same on each rank."""
    e, _, h, i = layer[1:]
    experts = GroupedExperts(e, h, i, device="meta").to_empty(device="cuda").requires_grad_(False)
    generator = torch.Generator(device="cuda").manual_seed(0)
    for name in experts.fp8_names:
        codes, scales = experts.get_parameter(name), experts.get_parameter(f"{name}_scale_inv")
        for expert in codes.data:
            values = torch.randn(expert.shape, device="cuda", generator=generator)
            expert.copy_((60 * values).to(torch.float8_e4m3fn))
        scales.data.fill_(1 / 60 / codes.shape[2] ** 0.5)
    return experts


def part_of(experts: GroupedExperts, rank: int, num_ranks: int) -> GroupedExperts:
    """A rank's part, which shares the memory of the whole."""
    total = experts.num_experts
    begin, end = (r * total // num_ranks for r in (rank, rank + 1))
    part = GroupedExperts(
        end - begin, experts.hidden_size, experts.intermediate_size, device="meta"
    )
    part.expert_offset, part.num_global_experts = begin, total
    for name, whole in experts.named_parameters():
        part._parameters[name] = torch.nn.Parameter(whole[begin:end], requires_grad=False)
    return part


def tokens_of(layer: Layer, num_tokens: int, rank: int) -> Tokens:
    """Random tokens of a rank, whose choices are uniform and differ."""
    generator = torch.Generator(device="cuda").manual_seed(1000 + rank)
    options = {"device": "cuda", "generator": generator}
    x = torch.randn(num_tokens, layer.hidden_size, **options).bfloat16()
    scores, ids = torch.rand(num_tokens, layer.num_experts, **options).topk(layer.top_k)
    return x, ids, scores / scores.sum(1, keepdim=True)
