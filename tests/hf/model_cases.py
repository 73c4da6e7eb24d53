"""Whole transformers models on small FP8 checkpoints: loaded strictly, and their references."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import moefp8
from moefp8.checkpoint import LoadReport, fp8_modules
from tests import naive

RELEASE = tuple(int(number) for number in transformers.__version__.split(".")[:2])
MTP = "model.layers.3."  # of the small DeepSeek-V3, which has three layers


def load(directory: Path, device: str = "cpu") -> tuple[PreTrainedModel, LoadReport]:
    """transformers' model with our modules where the checkpoint holds FP8 weights."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):  # allocates nothing: no BF16 weights on the way
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    moefp8.convert(model, only=fp8_modules(directory, model=model))
    rotary = model.model.rotary_emb  # computed from the config, stored in no checkpoint
    model.model.rotary_emb = type(rotary)(config).to(device)
    return model, moefp8.load_checkpoint(model, directory, device=device)


def prompt() -> torch.Tensor:
    return torch.randint(2, 512, (3, 40))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


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
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def use_choices_of(source: torch.nn.Module, follower: torch.nn.Module) -> None:
    """Where two experts score almost the same, rounding chooses: let it choose once for both."""
    chosen = {}
    for name, module in source.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda m, a, output, n=name: chosen.update({n: output}))
            gate = follower.get_submodule(name)
            gate.register_forward_hook(lambda m, a, output, n=name: chosen[n])


def states_differ(one: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Names of tensors that are not the same, dtype and bytes."""
    left, right = one.state_dict(), other.state_dict()
    return [
        name
        for name in left.keys() | right.keys()
        if name not in left
        or name not in right
        or left[name].dtype != right[name].dtype
        or not torch.equal(
            left[name].contiguous().view(torch.uint8), right[name].contiguous().view(torch.uint8)
        )
    ]
