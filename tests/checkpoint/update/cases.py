"""A trainer's tensors for `Tiny`, how it sends them, and the models that loads of them give."""

import re
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import moefp8
from moefp8.checkpoint import load_checkpoint
from tests.checkpoint.cases import Tiny, deepseek_tensors, model_bytes, spoiled

EXPERTS = "model.layers.0.mlp.experts"


def trainer_tensors(
    num_layers: int = 1, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Key -> tensor for `Tiny`, in DeepSeek-V3's naming, without FP8."""
    torch.manual_seed(1)
    tensors = {
        key: torch.randn(x.shape).mul_(torch.rand(len(x), 1) * 8).to(dtype)
        if x.dtype == torch.float8_e4m3fn
        else x
        for key, x in deepseek_tensors(num_layers).items()
        if not key.endswith("_scale_inv")
    }
    tensors[f"{EXPERTS}.1.up_proj.weight"][:128, 128:] = 0
    tensors[f"{EXPERTS}.2.down_proj.weight"][3, 5] = float("nan")
    return tensors


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with experts as transformers stacks them."""
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    others = {}
    for key, x in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight(.*)", key)
        if match is None:
            others[key] = x
            continue
        home, expert, name, suffix = match.groups()
        stack = "down_proj" if name == "down" else "gate_up_proj"
        found.setdefault(f"{home}.{stack}{suffix}", {})[int(expert), name] = x
    for key, pieces in found.items():
        experts = sorted({expert for expert, _ in pieces})
        names = ("down",) if ".down_proj" in key else ("gate", "up")
        others[key] = torch.stack([torch.cat([pieces[e, n] for n in names]) for e in experts])
    return others


def buckets(tensors: dict[str, torch.Tensor], count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Deal them to so many calls in turn, so that no layer comes at once."""
    for first in range(count):
        yield dict(list(tensors.items())[first::count])


def loaded(tmp_path, tensors: dict[str, torch.Tensor], model: nn.Module) -> nn.Module:
    """The model, filled from a file of these tensors."""
    file = tmp_path / "wanted.safetensors"
    save_file({key: x.contiguous() for key, x in tensors.items()}, file)
    load_checkpoint(model, file)
    return model


def quantized(tmp_path, tensors: dict[str, torch.Tensor], num_layers: int = 1) -> nn.Module:
    """A `Tiny` of tensors without FP8 that is quantized after it is loaded."""
    return frozen(loaded(tmp_path, tensors, moefp8.unfreeze(Tiny(num_layers))))


def frozen(model: nn.Module) -> nn.Module:
    """Quantize master weights, of which one is NaN."""
    with pytest.warns(UserWarning, match="hold NaN or Inf"):
        return moefp8.freeze(model)


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: x.data_ptr() for name, x in model.state_dict(keep_vars=True).items()}


def update(model: nn.Module, *calls, **options) -> None:
    """Update a model by these calls, which moves nothing of it."""
    before = addresses(model)
    parameters = dict(model.named_parameters())
    with moefp8.updating(model, **options) as block:
        for call in calls:
            block.add(call)
    assert addresses(model) == before
    assert all(x is parameters[name] for name, x in model.named_parameters())


def spoiled_tiny(num_layers: int = 1) -> nn.Module:
    return spoiled(Tiny(num_layers))


def assert_same_model(got: nn.Module, wanted: nn.Module) -> None:
    ours, theirs = model_bytes(got), model_bytes(wanted)
    assert ours.keys() == theirs.keys()
    assert [name for name, x in ours.items() if x != theirs[name]] == []
