"""Checkpoints of NVIDIA's modelopt, of gpt-oss and of compressed-tensors: what a user is told."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

import moefp8
from moefp8.checkpoint import inspect_checkpoint, quantize_checkpoint
from moefp8.hf import pretrained_config
from moefp8.testing import row_errors
from tests.checkpoint.cases import refusal
from tests.checkpoint.transformers_cases import fp8_of, saved
from tests.hf.model_cases import BLOCKS, change_config, change_tensors, tensors_of

E4M3 = torch.float8_e4m3fn
QUANTIZE = "quantize the 16-bit original (python -m moefp8 quantize)"


def messages_of(path: Path, tmp_path: Path) -> list[str]:
    """What each way to a model says, the command `inspect` last."""
    with pytest.raises(ValueError, match="pretrained_config: ") as caught:
        pretrained_config(str(path))
    errors = [x for x in inspect_checkpoint(path).anomalies if x.severity == "error"]
    return [
        refusal(fp8_of, path),
        refusal(moefp8.load_checkpoint, nn.Linear(1, 1), path),
        refusal(quantize_checkpoint, path, tmp_path / "t", progress=False),
        str(caught.value),
        *(x.examples[0] for x in errors if x.rule == "another format"),
    ]


# modelopt


@pytest.fixture
def nvfp4(qwen) -> Path:
    """Linears as modelopt writes them: two numbers in a byte, an E4M3 scale for 16 of them."""

    def change(key: str, x: torch.Tensor) -> list:
        if key.endswith("_scale_inv"):
            return []
        if x.dtype != E4M3:
            return [(key, x)]
        n, k = x.shape
        scales = {"weight_scale": torch.ones(n, k // 16).to(E4M3)}
        scales |= {name: torch.ones(()) for name in ("weight_scale_2", "input_scale")}
        codes = torch.zeros(n, k // 2, dtype=torch.uint8)
        return [(key, codes), *((key.replace("weight", x), y) for x, y in scales.items())]

    change_tensors(qwen, change)
    change_config(qwen, "quantization_config")
    facts = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    stated = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": facts}
    (qwen / "hf_quant_config.json").write_text(json.dumps(stated))
    return qwen


def test_nvfp4_of_modelopt_is_named(nvfp4, tmp_path):
    """Older releases say nothing in config.json."""
    messages = messages_of(nvfp4, tmp_path)
    assert len(messages) == 5
    for message in messages:
        assert "hf_quant_config.json: quant_method must be one of fp8, " in message
        assert "it says quant_method 'modelopt', quant_algo 'NVFP4', a format" in message
        assert QUANTIZE in message
        assert "no quantization_config" not in message


def test_nvfp4_of_modelopt_in_config_json_is_named(nvfp4, tmp_path):
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {}}
    change_config(nvfp4, quantization_config=quantization)
    for message in messages_of(nvfp4, tmp_path):
        assert "config.json: quant_method must be one of fp8, " in message
        assert "hf_quant_config" not in message
        assert "'modelopt', quant_algo 'NVFP4'" in message
        assert QUANTIZE in message


def test_a_file_of_modelopt_s_beside_16_bits_counts_for_nothing(nvfp4, tmp_path):
    path = shutil.copytree(nvfp4.with_name("fp8-bf16"), tmp_path / "copy")
    shutil.copy(nvfp4 / "hf_quant_config.json", path)
    assert inspect_checkpoint(path).is_loadable
    quantize_checkpoint(path, tmp_path / "t", progress=False)


@pytest.mark.parametrize("text", ["{", '{"quantization": 7}'])
def test_a_broken_file_of_modelopt_s_is_told(nvfp4, text):
    (nvfp4 / "hf_quant_config.json").write_text(text)
    assert "hf_quant_config.json" in refusal(moefp8.load_checkpoint, nn.Linear(1, 1), nvfp4)


# gpt-oss


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory) -> Path:
    """A small gpt-oss whose experts are in MXFP4, of random codes: E = 4, H = I = 64."""
    path = tmp_path_factory.mktemp("gpt_oss") / "saved"
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    saved(GptOssConfig(**sizes, **heads, **experts, **rope), path)
    tensors = tensors_of(path)
    for key in [key for key in tensors if key.endswith("_proj") and "experts" in key]:
        num_experts, k, n = tensors.pop(key).shape
        codes, scales = (num_experts, n, k // 32, 16), (num_experts, n, k // 32)
        tensors[f"{key}_blocks"] = torch.randint(256, codes, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(118, 123, scales, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    change_config(path, quantization_config={"quant_method": "mxfp4"})
    return path


def test_mxfp4_is_told_the_way_that_works(mxfp4, tmp_path):
    messages = messages_of(mxfp4, tmp_path)
    assert len(messages) == 5
    for message in messages:
        assert "it says quant_method 'mxfp4'" in message
        assert "quantization_config=transformers.Mxfp4Config(dequantize=True)" in message
        assert 'experts_implementation="moefp8"' in message
        assert QUANTIZE not in message


def test_the_way_that_mxfp4_is_told_works(mxfp4):
    def experts_of(**options) -> nn.Module:
        config = Mxfp4Config(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(mxfp4, quantization_config=config, **options)
        return model.model.layers[0].mlp.experts

    x, ids = torch.randn(9, 64).bfloat16(), torch.rand(9, 4).argsort()[:, :2]
    scores = torch.rand(9, 2).bfloat16()
    with torch.no_grad():
        expected = experts_of()(x, ids, scores)
        y = experts_of(experts_implementation="moefp8")(x, ids, scores)
    assert 0.001 < float(row_errors(y, expected).max()) < 0.13


# others


def test_compressed_tensors_with_an_fp8_config_is_told_the_way(qwen):
    change_config(qwen, quantization_config=BLOCKS)
    message = refusal(fp8_of, qwen)
    assert "config.json says quant_method 'compressed-tensors'" in message
    assert "pass config=moefp8.hf.pretrained_config(path)" in message


def test_configs_of_transformers_keep_its_own_errors(mxfp4):
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="The model is quantized with Mxfp4Config"):
        AutoModelForCausalLM.from_pretrained(mxfp4, quantization_config=config)
