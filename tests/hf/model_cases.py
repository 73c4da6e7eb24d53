"""Whole transformers models on small checkpoints: how they are loaded, changed and compared."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from small_checkpoint import COMMON
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import moefp8
from moefp8 import FP8Linear, GroupedExperts
from moefp8.checkpoint import LoadReport, fp8_modules
from tests import naive

SIZES = {
    **COMMON,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
RELEASE = tuple(int(number) for number in transformers.__version__.split(".")[:2])
MTP = "model.layers.3."  # of the small DeepSeek-V3, which has three layers
BLOCKS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"strategy": "block", "block_structure": [128, 128], "num_bits": 8},
        }
    },
    "ignore": ["lm_head"],
}


def load(directory: Path, device: str = "cpu") -> tuple[PreTrainedModel, LoadReport]:
    """transformers' model with our modules where the checkpoint holds FP8 weights."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):  # allocates nothing: no BF16 weights on the way
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    moefp8.convert(model, only=fp8_modules(directory, model=model))
    rotary = model.model.rotary_emb  # computed from the config, stored in no checkpoint
    model.model.rotary_emb = type(rotary)(config).to(device)
    return model, moefp8.load_checkpoint(model, directory, device=device)


def plain(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)


def prompt() -> torch.Tensor:
    return torch.randint(2, 512, (3, 40))


def fp8_names(model: nn.Module) -> set[str]:
    kinds = FP8Linear | GroupedExperts
    return {name for name, module in model.named_modules() if isinstance(module, kinds)}


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def change_config(directory: Path, *without: str, **values) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: x for key, x in config.items() if key not in without}))


def change_tensors(directory: Path, change: Callable[[str, torch.Tensor], list]) -> None:
    """change: (key, tensor) -> the pairs to write instead."""
    file = directory / "model.safetensors"
    tensors = dict(pair for item in load_file(file).items() for pair in change(*item))
    save_file(tensors, file, metadata={"format": "pt"})


def without(*missing: str) -> Callable[[str, torch.Tensor], list]:
    """A change for `change_tensors` that leaves these keys out."""
    return lambda key, x: [] if key in missing else [(key, x)]


def dequantized_checkpoint(source: Path, target: Path) -> Path:
    """The same checkpoint in FP32, by the reference's own arithmetic on the raw tensors."""
    tensors = tensors_of(source)
    plain = {}
    for key, tensor in tensors.items():
        if key.endswith("_scale_inv") or key.startswith(MTP):
            continue
        scale = tensors.get(f"{key}_scale_inv")
        plain[key] = tensor if scale is None else naive.values(tensor, scale, 128).float()
    target.mkdir()
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((source / "config.json").read_text())
    change_config(target, "quantization_config")
    return target


def use_choices_of(source: nn.Module, follower: nn.Module) -> None:
    """Where two experts score almost the same, rounding chooses: let it choose once for both."""
    chosen = {}
    for name, module in source.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda m, a, output, n=name: chosen.update({n: output}))
            gate = follower.get_submodule(name)
            gate.register_forward_hook(lambda m, a, output, n=name: chosen[n])
