"""A tiny MoE model, checkpoints for it in the namings of three families, and byte comparison.

What is expected here is not computed by moefp8.checkpoint. E experts, H hidden, I intermediate.
"""

import ctypes
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moefp8.checkpoint import CheckpointError, load_checkpoint
from moefp8.layers import FP8Linear, GroupedExperts

E, H, I = 3, 256, 320  # I / 128 is odd and not whole
CONFIG = {
    "model_type": "tiny",
    "num_hidden_layers": 2,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(E, H, dtype=torch.bfloat16))
        self.register_buffer("e_score_correction_bias", torch.zeros(E))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = FP8Linear(H, 576, bias=False)  # 4.5 blocks
        self.norm = nn.LayerNorm(H, dtype=torch.bfloat16)
        shared = {
            "gate_proj": FP8Linear(H, I, bias=False),
            "down_proj": FP8Linear(I, H, bias=False),
        }
        mlp = {"gate": Router(), "experts": GroupedExperts(E, H, I)}
        self.mlp = nn.ModuleDict({**mlp, "shared_experts": nn.ModuleDict(shared)})


class Tiny(nn.Module):
    """embed_tokens, two MoE layers, lm_head; tied: the head is the embedding."""

    def __init__(self, num_layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        layers = nn.ModuleList(Layer() for _ in range(num_layers))
        embedding = nn.Embedding(16, H, dtype=torch.bfloat16)
        self.model = nn.ModuleDict({"embed_tokens": embedding, "layers": layers})
        self.lm_head = nn.Linear(H, 16, bias=False, dtype=torch.bfloat16)
        if tied:
            self.lm_head.weight = embedding.weight


class StackedExperts(nn.Module):
    """Experts as transformers stacks them, in BF16."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * I, H, dtype=torch.bfloat16))
        self.down_proj = nn.Parameter(torch.zeros(E, H, I, dtype=torch.bfloat16))


def spoiled(model: nn.Module, device: str = "cpu") -> nn.Module:
    """Give a model memory that holds anything."""
    model.to_empty(device=device)
    for tensor in model.state_dict().values():
        tensor.view(torch.uint8).fill_(0x5A)
    return model


def random_fp8(*shape: int) -> torch.Tensor:
    """Every byte may come, NaN too: a loader has no opinion."""
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def random_scale(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float8_e8m0fnu:
        return torch.randint(0, 255, shape, dtype=torch.uint8).view(dtype)
    return (torch.rand(shape) * 1e-3).to(dtype)


def fp8_pair(key: str, n: int, k: int, dtype: torch.dtype = torch.float32) -> dict:
    """`key.weight` [n, k] and its scales, rounded up to whole blocks."""
    grid = (-(-n // 128), -(-k // 128))
    return {
        f"{key}.weight": random_fp8(n, k),
        f"{key}.weight_scale_inv": random_scale(grid, dtype),
    }


def deepseek_tensors(num_layers: int = 2, scale_dtype: torch.dtype = torch.float32) -> dict:
    """Key -> tensor for `Tiny`, in DeepSeek-V3's naming."""
    torch.manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(16, H, dtype=torch.bfloat16),
        "lm_head.weight": torch.randn(16, H, dtype=torch.bfloat16),
    }
    for layer in range(num_layers):
        base = f"model.layers.{layer}"
        tensors |= fp8_pair(f"{base}.kv_a_proj_with_mqa", 576, H, scale_dtype)
        tensors[f"{base}.norm.weight"] = torch.randn(H, dtype=torch.bfloat16)
        tensors[f"{base}.norm.bias"] = torch.randn(H, dtype=torch.bfloat16)
        tensors[f"{base}.mlp.gate.weight"] = torch.randn(E, H, dtype=torch.bfloat16)
        tensors[f"{base}.mlp.gate.e_score_correction_bias"] = torch.randn(E)
        tensors |= fp8_pair(f"{base}.mlp.shared_experts.gate_proj", I, H, scale_dtype)
        tensors |= fp8_pair(f"{base}.mlp.shared_experts.down_proj", H, I, scale_dtype)
        for expert in range(E):
            for name, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
                key = f"{base}.mlp.experts.{expert}.{name}_proj"
                tensors |= fp8_pair(key, *shape, scale_dtype)
    return tensors


def qwen_name(key: str) -> str:
    return key.replace(".shared_experts.", ".shared_expert.")


def minimax_name(key: str) -> str:
    key = key.replace(".mlp.gate.e_score", ".mlp.e_score").replace(".mlp.", ".block_sparse_moe.")
    for old, new in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        key = re.sub(rf"(experts\.\d+\.){old}_proj", rf"\1{new}", key)
    return key


def write(directory: Path, tensors: dict, config: dict | None = None, num_shards: int = 1) -> Path:
    """A checkpoint directory; keys are dealt to shards in turn, so that experts are split."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        shard = dict(list(tensors.items())[number::num_shards])
        save_file(shard, directory / name)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def read(directory: Path) -> dict:
    """Read all tensors of a checkpoint, by the safetensors library."""
    found: dict = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def assert_same_tensors(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (got[key].dtype, got[key].shape) == (tensor.dtype, tensor.shape), key
        assert bytes_of(got[key]) == bytes_of(tensor), key


def refusal(call, *arguments, **options) -> str:
    """The message of the CheckpointError that a call raises."""
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def refuse(path, *needles, model: nn.Module | None = None, **options) -> str:
    """Loading must fail, say every needle, and leave the model alone."""
    model = model or Tiny()
    before = _state_of(model)
    message = refusal(load_checkpoint, model, path, **options)
    for needle in needles:
        assert str(needle) in message, message
    assert _state_of(model) == before
    return message


def _state_of(model: nn.Module) -> tuple:
    tensors = model.state_dict().items()
    return model_bytes(model), [(name, x.device, x.data_ptr(), x.dtype) for name, x in tensors]


def assert_loads(path, tensors: dict, model: nn.Module | None = None, **options) -> None:
    """Every tensor comes from path to where it belongs in a new `Tiny`, or in model."""
    num_layers = 1 + ("model.layers.1.norm.weight" in tensors)
    load_checkpoint(model := model or Tiny(num_layers), path, **options)
    assert_holds(model, tensors)


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def model_bytes(model: nn.Module) -> dict[str, bytes]:
    return {
        name: bytes_of(tensor) for name, tensor in model.state_dict().items() if not tensor.is_meta
    }


def assert_holds(model: Tiny, tensors: dict) -> None:
    """Every tensor of the checkpoint, in DeepSeek's naming, is where it belongs."""
    state = model.state_dict()
    for key, wanted in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight(.*)", key)
        if found:
            prefix, expert, name, suffix = found.groups()
            stacked = "down_proj" if name == "down" else "gate_up_proj"
            got = state[f"{prefix}.{stacked}{suffix}"][int(expert)]
            rows = wanted.shape[0]
            if name != "down":
                got = got[:rows] if name == "gate" else got[rows:]
        else:
            got = state[key]
        if key.endswith("_scale_inv"):
            wanted = wanted.float()
        assert got.shape == wanted.shape, key
        assert bytes_of(got) == bytes_of(wanted), key
