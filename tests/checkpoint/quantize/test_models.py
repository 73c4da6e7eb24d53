"""Models of five families: saved in BF16 by transformers, quantized by the command, loaded."""

import pytest
import torch
from small_checkpoint import small_config
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module

from moefp8 import FP8Linear, GroupedExperts, convert
from moefp8.cli.main import main
from tests.checkpoint.cases import assert_same_tensors
from tests.checkpoint.quantize.cases import quantization_of
from tests.hf.model_cases import load


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "qwen3_moe", "mixtral", "qwen3_next", "minimax_m2"]
)
def test_it_loads_as_the_converted_model(tmp_path, capsys, family):
    """transformers' loader, told modules_to_not_convert, makes FP8 modules of the same ones."""
    original = AutoModelForCausalLM.from_config(small_config(family), dtype=torch.bfloat16)
    for name, buffer in original.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(buffer.shape) * 0.1  # FP32, as published
    original.save_pretrained(tmp_path / "bf16")
    capsys.readouterr()
    arguments = [str(tmp_path / "bf16"), str(tmp_path / "fp8"), "--max-shard-bytes", "1000000"]
    assert main(["quantize", *arguments]) == 0
    told = capsys.readouterr()
    assert "is the median of" in told.out
    assert told.err == ""

    model, _ = load(tmp_path / "fp8")
    convert(original)
    assert_same_tensors(model.state_dict(), original.state_dict())
    assert sum(isinstance(module, GroupedExperts) for module in model.modules()) >= 2
    kept = quantization_of(tmp_path / "fp8")["modules_to_not_convert"]
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear | GroupedExperts):
            assert should_convert_module(name, kept), name
        elif type(module) is torch.nn.Linear:
            assert not should_convert_module(name, kept), name
