"""Write a small FP8 checkpoint that is faithful to a family: its keys, shapes, scales and quirks.

A random transformers model is saved by transformers itself, so the keys are the family's own;
then every linear weight is quantized to 128x128 blocks, as the published checkpoints are.

    python examples/small_checkpoint.py deepseek_v3 DIR
"""

import argparse
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen3MoeConfig

from moefp8.quant import quantize_128x128

COMMON = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}

# What published checkpoints leave in BF16: embeddings, head, norms, routers and gates.
NOT_QUANTIZED = re.compile(r"embed_tokens|lm_head|norm|\.(gate|shared_expert_gate)\.|eh_proj")

SCALE_DTYPE = {"deepseek_v3": torch.float32, "qwen3_moe": torch.bfloat16}


def small_config(family: str) -> PretrainedConfig:
    """Sizes that keep what is awkward: a 576-row projection, experts that do not divide by 128."""
    if family == "deepseek_v3":
        return DeepseekV3Config(
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
        )
    if family == "qwen3_moe":
        return Qwen3MoeConfig(
            **COMMON,
            intermediate_size=384,
            moe_intermediate_size=320,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            num_key_value_heads=2,
            head_dim=64,
        )
    raise ValueError(f"small_config: family must be one of {sorted(SCALE_DTYPE)}, got {family!r}")


def write_small_checkpoint(
    directory: Path, family: str, seed: int = 0, num_shards: int = 3
) -> Path:
    """Write the checkpoint into `directory`, and its BF16 original beside it; return the latter."""
    torch.manual_seed(seed)
    original = directory.with_name(directory.name + "-bf16")
    model = AutoModelForCausalLM.from_config(small_config(family), dtype=torch.bfloat16)
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
        quantized[f"{key}_scale_inv"] = scale_inv.to(SCALE_DTYPE[family])
    _write_shards(directory, quantized, num_shards)
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
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
    parser.add_argument("family", choices=sorted(SCALE_DTYPE))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(write_small_checkpoint(arguments.directory, arguments.family))
