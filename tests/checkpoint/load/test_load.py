"""Loading puts every byte of a checkpoint where it belongs, whatever the family calls it."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import moefp8
from moefp8.checkpoint import fp8_modules, load_checkpoint, read_config
from moefp8.layers import FP8Linear, convert
from tests.checkpoint.cases import (
    CONFIG,
    H,
    Tiny,
    assert_holds,
    assert_loads,
    assert_same_tensors,
    deepseek_tensors,
    fp8_pair,
    minimax_name,
    qwen_name,
    write,
)

NAMES = ["lm_head.weight", "model.embed_tokens.weight"]  # one tensor has both, where it is tied


@pytest.mark.parametrize("naming", [str, qwen_name, minimax_name])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_naming_fills_every_slot(tmp_path, naming, num_shards):
    tensors = deepseek_tensors()
    named = {naming(key): tensor for key, tensor in tensors.items()}
    path = write(tmp_path / "c", named, num_shards=num_shards)
    report = load_checkpoint(model := Tiny(), path)
    assert_holds(model, tensors)
    assert report.num_tensors == len(tensors)
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.ignored == ()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e8m0fnu"])
def test_scales_upcast_exactly(tmp_path, name):
    tensors = deepseek_tensors(1, getattr(torch, name))
    if name == "float8_e8m0fnu":  # all exponents, 2**-127 among them
        key = "model.layers.0.kv_a_proj_with_mqa.weight_scale_inv"
        tensors[key] = torch.arange(10, dtype=torch.uint8).view(5, 2).view(torch.float8_e8m0fnu)
    model = Tiny(1)
    assert_loads(write(tmp_path / "c", tensors), tensors, model)
    if name == "float8_e8m0fnu":
        got = model.model.layers[0].kv_a_proj_with_mqa.weight_scale_inv.flatten().double()
        assert torch.equal(got, 2.0 ** (torch.arange(10).double() - 127))


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])  # ours, compressed-tensors'
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fused_keys_in_one_file(tmp_path, suffix, dtype):
    source, model = Tiny(1), Tiny(1)
    wanted = source.state_dict()
    stored = dict(wanted)
    for key in [key for key in wanted if key.endswith("_scale_inv")]:
        stored[key.replace("_scale_inv", suffix)] = scales = stored.pop(key).to(dtype)
        wanted[key] = scales.float()
    save_file(stored, tmp_path / "own.safetensors")
    load_checkpoint(model, tmp_path / "own.safetensors")
    assert_same_tensors(model.state_dict(), wanted)


def test_large_tensors_are_read_in_pieces(tmp_path):
    targets = {
        "direct": torch.zeros(5000, 4001),
        "cast": torch.zeros(5000, 4001, dtype=torch.float64),
        "strided": torch.zeros(64, 128).T,
    }
    tensors = {key: torch.randn(x.shape) for key, x in targets.items()}
    load_checkpoint(nn.ParameterDict(targets), write(tmp_path / "c", tensors, {}))
    assert all(torch.equal(x, tensors[key].to(x.dtype)) for key, x in targets.items())


def test_own_storage_is_kept(tmp_path):
    model = Tiny()
    before = [tensor.data_ptr() for tensor in model.state_dict().values()]
    load_checkpoint(model, write(tmp_path / "c", deepseek_tensors(scale_dtype=torch.bfloat16)))
    assert before == [tensor.data_ptr() for tensor in model.state_dict().values()]


def test_mtp_rotary_and_ignored_keys_are_left_out(tmp_path):
    tensors = deepseek_tensors()
    extra = {
        **fp8_pair("model.layers.2.eh_proj", 128, 128),
        "mtp.fc.weight": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
        "vision.patch.weight": torch.zeros(2),
    }
    path = write(tmp_path / "c", tensors | extra, {**CONFIG, "num_nextn_predict_layers": 1})
    model = Tiny()
    report = load_checkpoint(model, path, ignore=["vision.*"])
    assert_holds(model, tensors)
    assert set(report.ignored) == set(extra)
    assert not any(name.startswith(("model.layers.2", "mtp")) for name in fp8_modules(path))


def test_rename(tmp_path):
    tensors = deepseek_tensors()
    named = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    path = write(tmp_path / "c", named)

    def rename(key: str) -> str:
        return key if key.startswith("lm_head") else f"model.{key}"

    assert_loads(path, tensors, rename=rename)
    assert "model.layers.0.mlp.experts" in fp8_modules(path, rename=rename)


def test_meta_model_is_materialised(tmp_path):
    tensors = deepseek_tensors()
    with torch.device("meta"):
        model = Tiny(tied=True)
    model.lm_head.weight.requires_grad_(False)
    model.lm_head.weight.tag = "kept"
    del tensors["lm_head.weight"]
    assert_loads(write(tmp_path / "c", tensors), tensors, model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, nn.Parameter)
    assert not model.lm_head.weight.requires_grad
    assert model.lm_head.weight.tag == "kept"
    assert model.model.layers[0].norm.weight.requires_grad
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, nn.Parameter)


@pytest.mark.parametrize("stored", [NAMES[:1], NAMES[1:], NAMES], ids=["head", "embed", "both"])
def test_one_name_of_a_tied_tensor_is_enough(tmp_path, stored):
    tensors = deepseek_tensors()
    wanted = tensors.pop("model.embed_tokens.weight")
    del tensors["lm_head.weight"]
    tensors |= {name: wanted.clone() for name in stored}
    model = Tiny(tied=True)
    load_checkpoint(model, write(tmp_path / "c", tensors))
    assert torch.equal(model.lm_head.weight, wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_correction_bias_stays_fp32(tmp_path, device):
    tensors = deepseek_tensors()
    key = "model.layers.0.mlp.gate.e_score_correction_bias"
    tensors[key] = torch.tensor([15.0001, 15.0002, 15.0003])
    with torch.device(device):
        model = Tiny()
        gate = model.model.layers[0].mlp.gate
        gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16()
    load_checkpoint(model, write(tmp_path / "c", tensors))
    assert torch.equal(gate.e_score_correction_bias, tensors[key])
    assert isinstance(gate._buffers["e_score_correction_bias"], torch.Tensor)


def test_load_after_load_replaces_all(tmp_path):
    first, second = deepseek_tensors(), deepseek_tensors()
    second = {key: tensor.flip(0).contiguous() for key, tensor in second.items()}
    load_checkpoint(model := Tiny(), write(tmp_path / "a", first))
    assert_loads(write(tmp_path / "b", second, num_shards=2), second, model)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_autograd_sees_what_changed_in_place(tmp_path, mode):
    """As it sees a copy; what was made in inference mode has no version."""
    linear, x = FP8Linear(256, 256), torch.ones(2, 256, requires_grad=True)
    with torch.inference_mode():
        linear.register_buffer("of_inference", torch.ones(3))
    path = write(tmp_path / "c", linear.state_dict())
    y = linear(x)
    with mode():
        load_checkpoint(linear, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_scales_of_other_names(tmp_path):
    tensors = deepseek_tensors()
    named = {key.replace("weight_scale_inv", "scale"): value for key, value in tensors.items()}
    assert_loads(write(tmp_path / "a", named), tensors)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }
    named = {key.replace("_scale_inv", "_scale"): value for key, value in tensors.items()}
    path = write(tmp_path / "b", named, {**CONFIG, "quantization_config": quantization})
    assert_loads(path, tensors)
    assert read_config(path)["quantization_config"] == quantization


def test_fp8_modules_tell_convert_what_to_swap(tmp_path):
    tensors = {**fp8_pair("a", 576, H), "b.weight": torch.randn(8, H, dtype=torch.bfloat16)}
    config = copy.deepcopy(CONFIG)
    config["quantization_config"]["modules_to_not_convert"] = ["a"]  # such lists drift
    path = write(tmp_path / "c", tensors, config)
    assert fp8_modules(path) == ["a"]
    with torch.device("meta"):
        linears = {"a": nn.Linear(H, 576, bias=False), "b": nn.Linear(H, 8, bias=False)}
        model = nn.ModuleDict(linears).bfloat16()
    convert(model, only=fp8_modules(path))
    load_checkpoint(model, path)
    assert [type(linear) for linear in model.values()] == [FP8Linear, nn.Linear]
    assert_same_tensors(model.state_dict(), tensors)


def test_fp8_modules_speak_the_models_names(tmp_path):
    tensors = {minimax_name(key): tensor for key, tensor in deepseek_tensors(1).items()}
    path = write(tmp_path / "c", tensors)
    stored, own = fp8_modules(path), fp8_modules(path, model=Tiny(1))
    sharded = moefp8.shard(Tiny(1), {"*.experts": "experts"}, 1, 3)
    assert fp8_modules(path, model=sharded) == own
    assert "model.layers.0.block_sparse_moe.experts" in stored
    assert len(stored) == len(own) == 4
    assert "model.layers.0.mlp.experts" in own


def test_a_bar_is_shown_only_on_demand(tmp_path, capfd):
    path = write(tmp_path / "c", deepseek_tensors())
    load_checkpoint(Tiny(), path)
    assert capfd.readouterr().err == ""
    load_checkpoint(Tiny(), path, progress=True)
    shown = capfd.readouterr().err
    assert "100 %" in shown
    assert "GiB/s" in shown
