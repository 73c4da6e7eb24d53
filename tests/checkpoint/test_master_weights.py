"""Checkpoints of modules that hold master weights: from both kinds of file, and back."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import moefp8
from moefp8 import load_checkpoint, save_checkpoint
from moefp8.checkpoint import fp8_modules, read_config
from moefp8.layers import FP8Linear, GroupedExperts, PlainExperts
from tests.checkpoint.cases import (
    CONFIG,
    E,
    H,
    I,
    Tiny,
    assert_same_tensors,
    deepseek_tensors,
    minimax_name,
    model_bytes,
    read,
    refuse,
    write,
)
from tests.checkpoint.load.test_sharded import PLANS

PLAIN_CONFIG = {key: x for key, x in CONFIG.items() if key != "quantization_config"}


def trained(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tiny:
    with torch.device(device):
        return moefp8.unfreeze(Tiny(1), dtype)


def bf16_tensors() -> dict:
    """Without FP8: each weight has random values, and there are no scales."""
    return {
        key: torch.randn(x.shape).bfloat16() if x.dtype == torch.float8_e4m3fn else x
        for key, x in deepseek_tensors(1).items()
        if not key.endswith("_scale_inv")
    }


def without_nan(x: torch.Tensor) -> torch.Tensor:
    return x.float().nan_to_num(1.0).to(x.dtype) if x.dtype == torch.float8_e4m3fn else x


def assert_same_values(model: nn.Module, wanted: nn.Module) -> None:
    """Bit by bit, but for the payload of NaN."""
    state, expected = model.state_dict(), wanted.state_dict()
    assert state.keys() == expected.keys()
    for name, x in state.items():
        wanted_x = expected[name]
        assert x.dtype == wanted_x.dtype, name
        torch.testing.assert_close(x.float(), wanted_x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("naming", [str, minimax_name])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_files_are_dequantized_into_master_weights(tmp_path, dtype, naming, scale_dtype):
    tensors = deepseek_tensors(1, scale_dtype)
    path = write(tmp_path / "c", {naming(k): x for k, x in tensors.items()}, num_shards=3)
    load_checkpoint(frozen := Tiny(1), path)
    parameters = dict((model := trained(dtype)).named_parameters())
    report = load_checkpoint(model, path)
    assert report.num_tensors == len(tensors)
    assert all(x is parameters[name] for name, x in model.named_parameters())
    assert_same_values(model, moefp8.unfreeze(frozen, dtype))
    on_meta = trained(dtype, "meta")
    load_checkpoint(on_meta, path)
    assert_same_values(on_meta, model)
    assert on_meta.model.layers[0].mlp.experts.down_proj.requires_grad


@pytest.mark.parametrize("experts", ["whole", "whole weights"])
def test_experts_that_are_stored_whole(tmp_path, experts):
    torch.manual_seed(0)
    frozen = GroupedExperts(E, H, I)
    state, apart = frozen.state_dict(), {}
    if experts == "whole weights":  # and scales one by one
        gate, up = state.pop("gate_up_proj_scale_inv").chunk(2, dim=1)
        for name, stack in (("gate", gate), ("up", up), ("down", state.pop("down_proj_scale_inv"))):
            for expert, scale in enumerate(stack):
                apart[f"{expert}.{name}_proj.weight_scale_inv"] = scale.contiguous()
    save_file({**state, **apart}, tmp_path / "x.safetensors")
    model = GroupedExperts(E, H, I, trainable=True)
    load_checkpoint(model, tmp_path / "x.safetensors")
    wanted = frozen.dequantize()
    assert torch.equal(model.gate_up_proj, wanted[0])
    assert torch.equal(model.down_proj, wanted[1])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_rank_dequantizes_what_it_would_keep(tmp_path, plan, num_ranks, device):
    path = write(tmp_path / "c", deepseek_tensors(1), num_shards=3)
    load_checkpoint(whole := trained(), path)
    for rank in range(num_ranks):
        part = moefp8.shard(trained(device=device), plan, rank, num_ranks)
        load_checkpoint(part, path)
        assert_same_values(part, moefp8.shard(copy.deepcopy(whole), plan, rank, num_ranks))


def test_large_weights_are_dequantized_in_pieces(tmp_path):
    """More rows than a task takes, and columns that end in a block."""
    frozen = FP8Linear(1000, 3000, bias=False)
    save_checkpoint(frozen, tmp_path / "c")
    model = FP8Linear(1000, 3000, bias=False, trainable=True, dtype=torch.float32)
    load_checkpoint(model, tmp_path / "c")
    assert torch.equal(model.weight, frozen.dequantize(torch.float32))


def test_codes_follow_a_load(tmp_path):
    model = FP8Linear(H, H, trainable=True)
    x = torch.randn(9, H).bfloat16()
    model(x)
    save_checkpoint(other := FP8Linear(H, H), tmp_path / "c")
    load_checkpoint(model, tmp_path / "c")
    assert torch.equal(model(x), moefp8.FP8Linear.from_linear(other.to_linear())(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_files_are_taken_as_they_are(tmp_path, dtype):
    tensors = bf16_tensors()
    path = write(tmp_path / "c", tensors, PLAIN_CONFIG)
    load_checkpoint(model := trained(dtype), path)
    plain = moefp8.dequantize(trained(dtype), dtype)
    load_checkpoint(plain, path)
    assert_same_values(model, plain)


def test_an_fp8_file_of_fp8_and_plain_modules(tmp_path):
    """`fp8_modules` tells what to swap, in either form."""
    path = write(tmp_path / "c", deepseek_tensors(1))
    load_checkpoint(frozen := Tiny(1), path)
    with torch.device("meta"):
        model = moefp8.dequantize(Tiny(1))
        names = fp8_modules(path, model=model)
        moefp8.convert(model, only=names, trainable=True)
    load_checkpoint(model, path)
    assert_same_values(model, moefp8.unfreeze(frozen))


def test_what_is_tied_is_read_once(tmp_path):
    model = nn.ModuleDict({"a": FP8Linear(H, I, bias=False, trainable=True)})
    model["b"] = FP8Linear(H, I, bias=False, trainable=True)
    model["b"].weight = model["a"].weight
    frozen = FP8Linear(H, I, bias=False)
    state = {f"{x}.{name}": t.clone() for x in "ab" for name, t in frozen.state_dict().items()}
    save_file(state, tmp_path / "twins.safetensors")
    load_checkpoint(model, tmp_path / "twins.safetensors")
    assert model["a"].weight is model["b"].weight
    assert torch.equal(model["a"].weight, frozen.dequantize())
    save_file({k: x for k, x in state.items() if k[0] == "b"}, tmp_path / "b.safetensors")
    load_checkpoint(model, tmp_path / "b.safetensors")


PROJ = "model.layers.0.kv_a_proj_with_mqa"
EXPERT = "model.layers.0.mlp.experts.1.up_proj"


def without(tensors: dict, key: str) -> dict:
    return {name: x for name, x in tensors.items() if name != key}


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        (
            lambda x: without(x, f"{PROJ}.weight_scale_inv"),
            [f"{PROJ}.weight", f"an FP8 weight without its scale: {PROJ}.weight_scale_inv"],
        ),
        (
            lambda x: without(x, f"{EXPERT}.weight_scale_inv"),
            [f"an FP8 weight without its scale: {EXPERT}.weight_scale_inv"],
        ),
        (lambda x: without(x, f"{EXPERT}.weight"), [f"{EXPERT}.weight: missing from"]),
        (
            lambda x: {**x, f"{EXPERT}.weight": torch.zeros(I, H).bfloat16()},
            [f"{EXPERT}.weight_scale_inv", "extra, the scale of", "which is not FP8"],
        ),
        (
            lambda x: {**x, f"{EXPERT}.weight_scale_inv": torch.ones(3, 3)},
            ["shape must be [3, 2], got [3, 3]"],
        ),
        (
            lambda x: {**x, f"{PROJ}.weight_scale_inv": torch.full((5, 2), torch.nan)},
            ["10 of 10 scales are NaN or infinite"],
        ),
        (
            lambda x: {**x, f"{PROJ}.weight": torch.zeros(576, H, dtype=torch.int8)},
            ["dtype must be BF16 or F8_E4M3, got I8"],
        ),
        (
            lambda x: {**x, f"{PROJ}.weight_scale_inv": torch.ones(5, 2, dtype=torch.int8)},
            ["dtype of a scale must be one of"],
        ),
    ],
)
def test_what_misfits_is_refused_before_anything_is_read(tmp_path, change, needles):
    path = write(tmp_path / "c", change(deepseek_tensors(1)))
    refuse(path, *needles, model=trained())


def test_other_blocks_are_refused(tmp_path):
    config = copy.deepcopy(CONFIG)
    config["quantization_config"]["weight_block_size"] = [64, 64]
    path = write(tmp_path / "c", deepseek_tensors(1), config)
    refuse(path, "weight_block_size must be [128, 128]", model=trained())


def test_whole_gate_and_up_whose_cut_is_not_told_are_refused(tmp_path):
    frozen = GroupedExperts(2, 128, 200)  # 2 blocks each, 4 of all 400 rows
    save_file(frozen.state_dict(), tmp_path / "x.safetensors")
    model = GroupedExperts(2, 128, 200, trainable=True)
    refuse(tmp_path / "x.safetensors", "nothing tells whether gate and up", model=model)


def test_saved_master_weights_are_those_of_the_plain_modules(tmp_path):
    model = trained()
    save_checkpoint(model, tmp_path / "ours")
    save_checkpoint(moefp8.dequantize(copy.deepcopy(model)), tmp_path / "plain")
    saved = read(tmp_path / "ours")
    assert_same_tensors(saved, read(tmp_path / "plain"))
    assert f"{EXPERT}.weight" in saved
    assert read_config(tmp_path / "ours") == read_config(tmp_path / "plain") == {}
    load_checkpoint(again := trained(), tmp_path / "ours")
    assert_same_values(again, model)


def test_an_fp8_model_is_trained_and_saved_as_either(tmp_path):
    """Names and config.json come back, and the latter says FP8 only where codes are stored."""
    tensors = {minimax_name(key): without_nan(x) for key, x in deepseek_tensors(1).items()}
    config = {**CONFIG, "order": {"b": 1}}
    source = write(tmp_path / "source", tensors, config)
    load_checkpoint(model := trained(), source)
    save_checkpoint(model, tmp_path / "plain")
    plain = read(tmp_path / "plain")
    assert plain.keys() == {key for key in tensors if not key.endswith("_scale_inv")}
    assert read_config(tmp_path / "plain") == {**PLAIN_CONFIG, "order": {"b": 1}}
    moefp8.freeze(model)
    save_checkpoint(model, tmp_path / "fp8")
    assert read(tmp_path / "fp8").keys() == tensors.keys()
    assert read_config(tmp_path / "fp8") == config
    load_checkpoint(again := Tiny(1), tmp_path / "fp8")
    assert model_bytes(again) == model_bytes(model)


def test_plain_weights_that_were_loaded_whole_are_saved_whole(tmp_path):
    plain = PlainExperts(2, 128, 200)  # as FP8, only config.json tells how gate and up are cut
    save_file(plain.state_dict(), tmp_path / "x.safetensors")
    model = GroupedExperts(2, 128, 200, trainable=True)
    load_checkpoint(model, tmp_path / "x.safetensors")
    save_checkpoint(model, tmp_path / "whole")
    assert read(tmp_path / "whole").keys() == {"gate_up_proj", "down_proj"}
    save_checkpoint(model.freeze(), tmp_path / "fp8")
    assert_same_tensors(read(tmp_path / "fp8"), model.state_dict())
    load_checkpoint(again := GroupedExperts(2, 128, 200), tmp_path / "fp8")
    assert_same_tensors(again.state_dict(), model.state_dict())


def test_a_dequantized_model_says_nothing_of_fp8(tmp_path):
    load_checkpoint(model := Tiny(1), write(tmp_path / "c", deepseek_tensors(1)))
    save_checkpoint(moefp8.dequantize(model), tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == PLAIN_CONFIG


def test_a_model_on_meta_is_not_saved(tmp_path):
    model = FP8Linear(H, I, device="meta", trainable=True)
    with pytest.raises(moefp8.checkpoint.CheckpointError, match="on the meta device"):
        save_checkpoint(model, tmp_path / "c")
