"""Models of five families: saved in BF16 by transformers, quantized by the command, loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_checkpoint import COMMON, small_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MiniMaxM2Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)
from transformers.quantizers.quantizers_utils import should_convert_module

from moefp8 import FP8Linear, GroupedExperts, convert, load_checkpoint
from moefp8.checkpoint import fp8_modules
from tests.checkpoint.cases import assert_same_tensors
from tests.checkpoint.quantize.cases import quantization_of

FAMILIES = ("deepseek_v3", "qwen3_moe", "mixtral", "qwen3_next", "minimax_m2")
ATTENTION = {"num_key_value_heads": 2, "head_dim": 64, "num_experts_per_tok": 2}


def config_of(family: str) -> PretrainedConfig:
    if family == "mixtral":
        return MixtralConfig(**COMMON, **ATTENTION, intermediate_size=320, num_local_experts=4)
    if family == "minimax_m2":
        return MiniMaxM2Config(**COMMON, **ATTENTION, intermediate_size=192, num_local_experts=4)
    if family == "qwen3_next":
        return Qwen3NextConfig(
            **{**COMMON, "num_hidden_layers": 4},  # the fourth has full attention
            **ATTENTION,
            intermediate_size=384,
            moe_intermediate_size=192,
            shared_expert_intermediate_size=200,
            num_experts=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        )
    return small_config(family)


@pytest.fixture(scope="module", params=FAMILIES)
def quantized(request, tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    """The BF16 model, and the FP8 checkpoint that the command made of it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    model = AutoModelForCausalLM.from_config(config_of(request.param), dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(buffer.shape) * 0.1  # FP32, as published
    model.save_pretrained(folder / "bf16")
    command = [sys.executable, "-m", "moefp8", "quantize", folder / "bf16", folder / "fp8"]
    command += ["--max-shard-bytes", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "is the median of" in done.stdout
    return model, folder / "fp8"


def test_it_loads_as_the_converted_model(quantized):
    original, path = quantized
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=torch.bfloat16
        )
    convert(model, only=fp8_modules(path, model=model))
    fill_tables_of(model, original)
    load_checkpoint(model, path)
    convert(original)
    assert_same_tensors(model.state_dict(), original.state_dict())
    assert sum(isinstance(module, GroupedExperts) for module in model.modules()) >= 2
    check_lists(model, path)


def fill_tables_of(model: torch.nn.Module, original: torch.nn.Module) -> None:
    """Rotary tables, which no checkpoint holds."""
    for name, module in model.named_modules():
        for key, buffer in [*module.named_buffers(recurse=False)]:
            if key in module._non_persistent_buffers_set and buffer.is_meta:
                setattr(module, key, original.get_submodule(name).get_buffer(key).clone())
        if isinstance(getattr(module, "original_inv_freq", None), torch.Tensor):
            module.original_inv_freq = module.inv_freq


def check_lists(model: torch.nn.Module, path: Path) -> None:
    """transformers' loader, told modules_to_not_convert, makes FP8 modules of the same ones."""
    kept = quantization_of(path)["modules_to_not_convert"]
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear | GroupedExperts):
            assert should_convert_module(name, kept), name
        elif type(module) is torch.nn.Linear:
            assert not should_convert_module(name, kept), name
