"""Write a small FP8 checkpoint that is faithful to a family: its keys, shapes, scales and quirks.

A random transformers model is saved by transformers itself, so the keys are the family's own;
then every linear weight is quantized to 128x128 blocks, as the published checkpoints are.

    python examples/small_checkpoint.py deepseek_v3 DIR
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from moefp8.quant import quantize_128x128

COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# Published scales are in FP32, those of Qwen3 in BF16.
_SCALE_DTYPE = {"qwen3_moe": torch.bfloat16, "qwen3_next": torch.bfloat16}

# What published checkpoints leave in BF16: embeddings, head, norms, routers and gates.
NOT_QUANTIZED = re.compile(
    r"embed_tokens|lm_head|norm|\.(gate|shared_expert_gate|in_proj_ba)\.|eh_proj"
)

# Sizes that keep what is awkward: a 576-row projection, experts that do not divide by 128.
_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "deepseek_v3": lambda: DeepseekV3Config(
        **COMMON,
        intermediate_size=384,
        moe_intermediate_size=128,
        first_k_dense_replace=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        kv_lora_rank=512,
        q_lora_rank=192,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        num_key_value_heads=4,
        num_nextn_predict_layers=1,
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **COMMON,
        intermediate_size=384,
        moe_intermediate_size=192,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        num_key_value_heads=2,
        head_dim=64,
        num_nextn_predict_layers=0,
    ),
    "minimax_m2": lambda: MiniMaxM2Config(
        **COMMON,
        intermediate_size=192,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "mixtral": lambda: MixtralConfig(
        **COMMON,
        intermediate_size=320,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON,
        intermediate_size=384,
        moe_intermediate_size=320,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **COMMON,
        intermediate_size=384,
        moe_intermediate_size=192,
        shared_expert_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        head_dim=64,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
}
FAMILIES = tuple(_CONFIGS)


def small_config(family: str) -> PretrainedConfig:
    """The config of a small model of family, one of FAMILIES."""
    if family not in _CONFIGS:
        raise ValueError(f"small_config: family must be one of {FAMILIES}, got {family!r}")
    return _CONFIGS[family]()


def write_small_checkpoint(
    directory: Path, family: str, seed: int = 0, num_shards: int = 3, vocab_size: int = 512
) -> Path:
    """Write the checkpoint into `directory`, and its BF16 original beside it; return the latter."""
    torch.manual_seed(seed)
    original = directory.with_name(directory.name + "-bf16")
    config = small_config(family)
    config.vocab_size = vocab_size
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(buffer.shape) * 0.1  # FP32, as published
    model.save_pretrained(original)

    tensors = load_file(original / "model.safetensors")
    if family == "deepseek_v3":
        tensors |= _prediction_layer(tensors, model.config.num_hidden_layers)
    quantized = {}
    for key, tensor in tensors.items():
        if tensor.ndim != 2 or NOT_QUANTIZED.search(key):
            quantized[key] = tensor
            continue
        data, scale_inv = quantize_128x128(tensor)
        quantized[key] = data
        quantized[f"{key}_scale_inv"] = scale_inv.to(_SCALE_DTYPE.get(family, torch.float32))
    _write_shards(directory, quantized, num_shards)
    published = json.loads((original / "config.json").read_text())
    published["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (directory / "config.json").write_text(json.dumps(published, indent=2))
    return original


def _prediction_layer(tensors: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """DeepSeek-V3's layer of multi-token prediction, which inference leaves aside."""
    last, extra = f"model.layers.{index - 1}.", f"model.layers.{index}."
    layer = {key.replace(last, extra): t.clone() for key, t in tensors.items() if last in key}
    hidden_size = tensors["model.norm.weight"].numel()
    layer[f"{extra}eh_proj.weight"] = torch.randn(hidden_size, 2 * hidden_size).bfloat16()
    return layer


def _write_shards(directory: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    """Cut by the number of keys, so that a shard ends in the middle of an expert."""
    directory.mkdir(parents=True, exist_ok=True)
    keys, weight_map = sorted(tensors), {}
    size = -(-len(keys) // num_shards)
    for shard in range(num_shards):
        name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: tensors[key] for key in keys[shard * size : (shard + 1) * size]}
        save_file(part, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("directory", type=Path, help="for the FP8 checkpoint")
    parser.add_argument("--original", type=Path, help="for the BF16 one; default: DIRECTORY-bf16")
    parser.add_argument("--vocab-size", type=int, default=512)
    arguments = parser.parse_args()
    directory, vocab_size = arguments.directory, arguments.vocab_size
    original = write_small_checkpoint(directory, arguments.family, vocab_size=vocab_size)
    if arguments.original is not None:
        original = original.rename(arguments.original)
    print(f"FP8: {directory}\nBF16: {original}")
