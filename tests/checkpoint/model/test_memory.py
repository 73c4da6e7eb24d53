"""Tensors that share memory, and scales that fit two ways of cutting: refused, nothing written."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from moefp8 import convert
from moefp8.checkpoint import (
    CheckpointError,
    inspect_checkpoint,
    load_checkpoint,
    read_config,
    save_checkpoint,
)
from moefp8.layers import GroupedExperts
from tests.checkpoint.cases import CONFIG, E, H, assert_same_tensors, read, refuse, write
from tests.layers.conversion.plain_experts import PlainExperts


def pair_of(a: torch.Tensor, b: torch.Tensor) -> nn.Module:
    return nn.ParameterDict({"a": a, "b": b})


def refuse_random(tmp_path, model: nn.Module, *needles: str) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {key: torch.randn(x.shape, dtype=x.dtype) for key, x in model.state_dict().items()}
    save_file(tensors, path)
    refuse(path, *needles, model=model)


def test_two_keys_of_one_memory_are_refused(tmp_path):
    x = torch.randn(8, 6)
    told = "b: shares memory with a, which has another key; make both"
    halves = x.view(torch.float16)[:, 8:]
    for pair in ((x, x), (x[:5], x[4:]), (x, x[3]), (x[:, :4], x[:, 3:]), (x[:, :3], halves)):
        refuse_random(tmp_path, pair_of(*pair), told)
    refuse_random(tmp_path, pair_of(x, x.T), "shares memory with")


def test_parts_of_one_memory_that_do_not_meet_load(tmp_path):
    x = torch.randn(8, 6)
    for pair in ((x[:4], x[4:]), (x[:, :3], x[:, 3:]), (x[::2], x[1::2].T)):
        model = pair_of(*pair)
        tensors = {key: torch.randn(x.shape) for key, x in model.items()}
        save_file(tensors, tmp_path / "x.safetensors")
        load_checkpoint(model, tmp_path / "x.safetensors")
        assert_same_tensors(model.state_dict(), tensors)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(4),
        torch.zeros(4, 1).expand(4, 3),
        torch.zeros(9).as_strided((3, 3), (1, 1)),
    ],
)
def test_expanded_tensors_are_refused(tmp_path, tensor):
    model = nn.ParameterDict({"first": torch.zeros(3), "x": tensor})
    told = "x: several of its elements are one place in memory"
    refuse_random(tmp_path, model, told, ".clone()")


def test_what_shares_memory_is_saved_or_refused(tmp_path):
    x = torch.randn(8, 6)
    for number, model in enumerate([pair_of(x, x), pair_of(x[:5], x[4:]), pair_of(x, x.T)]):
        try:
            save_checkpoint(model, tmp_path / str(number))
        except CheckpointError:
            assert not (tmp_path / str(number)).exists()
        else:
            assert_same_tensors(read(tmp_path / str(number)), model.state_dict())


def layers(experts: nn.Module) -> nn.Module:
    return nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})


@pytest.mark.parametrize("i", [65, 100, 127, 200])
def test_fused_scales_that_fit_two_cuts_are_refused(tmp_path, i):
    """64 < I mod 128: ceil(2I / 128) blocks are as many as twice ceil(I / 128)."""
    model = layers(GroupedExperts(E, H, i))
    path = write(tmp_path / "c", model.state_dict())
    refuse(path, f"gate and up, {i} rows each, were cut", "store experts one by one", model=model)
    errors = [x.rule for x in inspect_checkpoint(path).anomalies if x.severity == "error"]
    assert errors == ["scales that do not tell how gate and up were cut into blocks"]


@pytest.mark.parametrize("i", [64, 128, 192, 320])
def test_fused_scales_that_fit_one_cut_load(tmp_path, i):
    model, other = layers(GroupedExperts(E, H, i)), layers(GroupedExperts(E, H, i))
    path = write(tmp_path / "c", model.state_dict())
    load_checkpoint(other, path)
    assert_same_tensors(other.state_dict(), model.state_dict())
    assert inspect_checkpoint(path).is_loadable


@pytest.mark.parametrize("i", [100, 128])
@pytest.mark.parametrize("was_fused", [True, False])
def test_experts_are_saved_such_that_they_load_again(tmp_path, i, was_fused):
    """Codes and scales are fused as they were, and config.json says the cut where they hide it."""
    model = layers(PlainExperts(E, H, i).bfloat16())
    if was_fused:
        load_checkpoint(model, write(tmp_path / "c", model.state_dict(), {"model_type": "m"}))
    convert(model)
    save_checkpoint(model, tmp_path / "saved")
    keys = read(tmp_path / "saved").keys()
    if was_fused:
        names = ("gate_up_proj", "down_proj")
        assert keys == {f"mlp.experts.{x}{y}" for x in names for y in ("", "_scale_inv")}
    else:
        assert "mlp.experts.0.gate_proj.weight_scale_inv" in keys
        assert not any(key.endswith("experts.down_proj") for key in keys)
    other = layers(GroupedExperts(E, H, i))
    load_checkpoint(other, tmp_path / "saved")
    assert_same_tensors(other.state_dict(), model.state_dict())
    assert inspect_checkpoint(tmp_path / "saved").is_loadable
    quantization = read_config(tmp_path / "saved")["quantization_config"]
    separate = {"gate_up_blocks": "separate"} if was_fused and i == 100 else {}
    assert quantization == CONFIG["quantization_config"] | separate
