"""Models without experts whose forwards read weights, or hold linears of another make."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Mamba2Config,
    Mamba2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from moefp8 import FP8Linear
from moefp8.checkpoint import quantize_checkpoint
from moefp8.hf import FP8Config

H = {"hidden_size": 128, "vocab_size": 256}
T5 = {"num_layers": 2, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4, "vocab_size": 256}

# kind, config, how many linears become FP8
MODELS = {
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=256),
        8,  # all Conv1D
    ),
    "t5": (T5ForConditionalGeneration, T5Config(**T5), 28),  # all but wo, which it keeps in FP32
    "falcon_mamba": (FalconMambaForCausalLM, FalconMambaConfig(**H, num_hidden_layers=2), 2),
    "mamba2": (
        Mamba2ForCausalLM,
        Mamba2Config(**H, num_hidden_layers=2, num_heads=8, head_dim=32, n_groups=1),
        2,
    ),
    "bloom": (BloomForCausalLM, BloomConfig(**H, n_layer=2, n_head=4), 4),
}


@pytest.mark.parametrize("family", MODELS)
def test_they_load_in_fp8_run_and_come_back(family, tmp_path):
    torch.manual_seed(0)
    kind, config, count = MODELS[family]
    model = kind(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "bf16")
    ours = kind.from_pretrained(tmp_path / "bf16", quantization_config=FP8Config())
    assert sum(isinstance(module, FP8Linear) for module in ours.modules()) == count
    ids = {"input_ids": torch.randint(0, 256, (1, 9))}
    if family == "t5":
        ids["decoder_input_ids"] = torch.randint(0, 256, (1, 5))
    with torch.no_grad():
        wanted, got = model(**ids).logits.float(), ours(**ids).logits.float()
    assert 1e-4 < (got - wanted).norm() / wanted.norm() < 0.12
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "quantized")
    same = kind.from_pretrained(tmp_path / "quantized", quantization_config=FP8Config())
    with torch.no_grad():
        assert torch.equal(same(**ids).logits.float(), got)
    ours.save_pretrained(tmp_path / "fp8")
    again = kind.from_pretrained(tmp_path / "fp8", quantization_config=FP8Config())
    with torch.no_grad():
        assert torch.equal(again(**ids).logits.float(), got)
