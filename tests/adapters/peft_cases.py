"""Models that PEFT adapts, its configs, and small models of transformers."""

import copy

import pytest
import torch
from torch import nn

import moefp8
from moefp8.adapters import remove_lora
from tests.adapters.cases import E, H, I, K


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = moefp8.FP8Linear(H, 40), moefp8.FP8Linear(40, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = moefp8.GroupedExperts(E, H, I)
        self.index, self.weights = torch.randint(0, E, (12, K)), torch.rand(12, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.index, self.weights)


def lora_config(**settings):
    import peft

    return peft.LoraConfig(r=4, lora_alpha=8, **settings)


def drawn(model: nn.Module) -> nn.Module:
    """A model of PEFT's, with other values in every B."""
    for name, x in model.named_parameters():
        if ".lora_B." in name:
            x.data.normal_(std=0.2)
    return model


def dequantized(model: nn.Module) -> nn.Module:
    return moefp8.dequantize(remove_lora(copy.deepcopy(model)))


SIZES = {
    "qwen3_moe": {
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "head_dim": 32,
    },
    "deepseek_v3": {
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    },
}


def small_model(kind: str, num_layers: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        **SIZES.get(kind, {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()
