"""Models without experts whose forwards read weights, or hold linears of another make."""

import pytest
import torch
from transformers import (
    BloomForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    GPT2LMHeadModel,
    Mamba2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from moefp8 import FP8Linear
from moefp8.checkpoint import quantize_checkpoint
from tests.checkpoint.transformers_cases import fp8_of
from tests.hf.test_filled import BLOOM, GPT2, MAMBA, H

T5 = {"num_layers": 2, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4, "vocab_size": 256}

# kind, config, how many linears become FP8
MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2, 8),  # all Conv1D
    "t5": (T5ForConditionalGeneration, T5Config(**T5), 28),  # all but wo, which it keeps in FP32
    "falcon_mamba": (FalconMambaForCausalLM, FalconMambaConfig(**H, num_hidden_layers=2), 2),
    "mamba2": (Mamba2ForCausalLM, MAMBA, 2),
    "bloom": (BloomForCausalLM, BLOOM, 4),
}


@pytest.mark.parametrize("family", MODELS)
def test_they_load_in_fp8_run_and_come_back(family, tmp_path):
    torch.manual_seed(0)
    kind, config, count = MODELS[family]
    model = kind(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "bf16")
    ours = fp8_of(tmp_path / "bf16", kind)
    assert sum(isinstance(module, FP8Linear) for module in ours.modules()) == count
    ids = {"input_ids": torch.randint(0, 256, (1, 9))}
    if family == "t5":
        ids["decoder_input_ids"] = torch.randint(0, 256, (1, 5))
    with torch.no_grad():
        wanted, got = model(**ids).logits.float(), ours(**ids).logits.float()
    assert 1e-4 < (got - wanted).norm() / wanted.norm() < 0.12
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "quantized")
    ours.save_pretrained(tmp_path / "fp8")
    for path in (tmp_path / "quantized", tmp_path / "fp8"):
        with torch.no_grad():
            assert torch.equal(fp8_of(path, kind)(**ids).logits.float(), got)
