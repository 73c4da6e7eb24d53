"""Write checkpoints of random weights, in 128x128 FP8 blocks, with the configs of published models.

H is a weight's last axis, its fan-in. Weights are normal with a variance of 1/H, so that numbers
neither vanish nor grow on their way; a code is 100 times a normal number, clamped to +-448, and a
scale about 1 / (100 sqrt(H)). No code is NaN.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen3MoeConfig

from moefp8.checkpoint.files.config import FP8_QUANTIZATION
from moefp8.checkpoint.files.header import DTYPE_NAMES
from moefp8.checkpoint.files.target import in_shards, shard_name, write_index, write_json
from moefp8.checkpoint.quantize.shard_file import create, write
from moefp8.kernels import E4M3, num_blocks

_CODE_STD, _CODE_MAX = 100.0, 448.0
_MAX_SHARD_BYTES, _CHUNK = 4 << 30, 1 << 24


class Model(NamedTuple):
    """sizes: of the published config; tiny: other ones, which a CPU runs in a second.

    most_layers: so many of them at most, since one GPU has to hold them.
    """

    title: str
    config: type[PretrainedConfig]
    sizes: dict[str, Any]
    tiny: dict[str, Any]
    most_layers: int | None = None

    def make_config(self, num_layers: int | None = None, tiny: bool = False) -> PretrainedConfig:
        """The config, of at most `num_layers` layers, the last of which has experts."""
        sizes = self.sizes | (self.tiny if tiny else {})
        given = sizes["num_hidden_layers"], self.most_layers, num_layers
        sizes["num_hidden_layers"] = least = min(n for n in given if n is not None)
        if "first_k_dense_replace" in sizes:
            sizes["first_k_dense_replace"] = min(sizes["first_k_dense_replace"], least - 1)
        return self.config(**sizes, dtype="bfloat16")

    def title_of(self, config: PretrainedConfig) -> str:
        """With the number of layers, if they are less than there are."""
        is_whole = config.num_hidden_layers == self.sizes["num_hidden_layers"]
        return self.title if is_whole else f"{self.title}, {config.num_hidden_layers} layers"


_TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS = {
    "qwen3_30b_a3b": Model(
        "Qwen3-30B-A3B",
        Qwen3MoeConfig,
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": False,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        },
        _TINY | {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8},
    ),
    "deepseek_v3": Model(
        "DeepSeek-V3",
        DeepseekV3Config,
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 163840,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 40.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
            "num_nextn_predict_layers": 0,
            "tie_word_embeddings": False,
        },
        _TINY
        | {
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
        },
        most_layers=4,
    ),
}


class Tensor(NamedTuple):
    """A tensor of the checkpoint: normal numbers with this mean and standard deviation."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    mean: float
    std: float

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def on_meta(config: PretrainedConfig) -> Any:
    """transformers' own model of a config, without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def tensors_of(config: PretrainedConfig) -> Iterator[Tensor]:
    """All tensors of a model, FP8 weights and their scales one expert at a time.

    Embeddings, the head, norms and routers are in BF16, and biases of routers in FP32, as they are
    published.
    """
    model = on_meta(config)
    linears = {name for name, x in model.named_modules() if type(x) is nn.Linear} - {"lm_head"}
    for name, tensor in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if module.endswith(".experts"):
            halves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            num_experts, rows, columns = tensor.shape
            for expert, half in product(range(num_experts), halves):
                key = f"{module}.{expert}.{half}.weight"
                yield from _fp8(key, (rows // len(halves), columns))
        elif module in linears and leaf == "weight":
            yield from _fp8(name, tuple(tensor.shape))
        elif tensor.ndim == 1:
            is_norm = leaf == "weight"
            dtype = torch.bfloat16 if is_norm or module in linears else torch.float32
            yield Tensor(name, dtype, tuple(tensor.shape), float(is_norm), 0.02)
        else:
            std = 1.0 if "embed" in module else tensor.shape[-1] ** -0.5
            yield Tensor(name, torch.bfloat16, tuple(tensor.shape), 0.0, std)


def _fp8(key: str, shape: tuple[int, int]) -> Iterator[Tensor]:
    yield Tensor(key, E4M3, shape, 0.0, _CODE_STD)
    scale_inv, blocks = shape[1] ** -0.5 / _CODE_STD, tuple(map(num_blocks, shape))
    yield Tensor(f"{key}_scale_inv", torch.float32, blocks, scale_inv, 0.05 * scale_inv)


def write_checkpoint(
    config: PretrainedConfig,
    directory: Path,
    device: torch.device,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> int:
    """Write a checkpoint, several shards at once, and return its bytes.

    The same device writes the same numbers each time; the host has a few MiB of them at once.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = list(tensors_of(config))
    shards = list(in_shards(tensors, lambda tensor: tensor.num_bytes, max_shard_bytes))
    names = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(min(len(shards), os.cpu_count() or 1)) as pool:
        files = [directory / name for name in names]
        list(pool.map(partial(_write_shard, device), range(len(shards)), files, shards))
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    by_key = {x.key: name for name, shard in zip(names, shards, strict=True) for x in shard}
    write_index(directory, by_key, num_bytes)
    weights = (x.key for x in tensors if x.dtype == torch.bfloat16 and x.key.endswith(".weight"))
    kept = [key.removesuffix(".weight") for key in weights]
    quantization = {**FP8_QUANTIZATION, "modules_to_not_convert": kept}
    about = {"architectures": [type(on_meta(config)).__name__], "quantization_config": quantization}
    write_json(directory / "config.json", config.to_dict() | about)
    return num_bytes


def _write_shard(device: torch.device, seed: int, path: Path, shard: list[Tensor]) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    file, entries = create(path, [(x.key, DTYPE_NAMES[x.dtype], x.shape) for x in shard])
    try:
        for tensor in shard:
            for begin in range(0, prod(tensor.shape), _CHUNK):
                size = min(_CHUNK, prod(tensor.shape) - begin)
                values = torch.randn(size, generator=generator, device=device)
                values.mul_(tensor.std).add_(tensor.mean)
                if tensor.dtype == E4M3:
                    values.clamp_(-_CODE_MAX, _CODE_MAX)
                offset = begin * tensor.dtype.itemsize
                write(file, entries[tensor.key], offset, values.to(tensor.dtype).cpu())
    finally:
        os.close(file)
