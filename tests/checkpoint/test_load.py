"""Loading puts every byte of a checkpoint where it belongs, whatever the family calls it."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from moefp8.checkpoint import fp8_modules, load_checkpoint, read_config
from moefp8.layers import FP8Linear, convert
from tests.checkpoint.cases import (
    CONFIG,
    H,
    Tiny,
    assert_holds,
    assert_loads,
    bytes_of,
    deepseek_tensors,
    fp8_pair,
    minimax_name,
    qwen_name,
    write,
)

NAMINGS = {"deepseek": str, "qwen": qwen_name, "minimax": minimax_name}


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_naming_fills_every_slot(tmp_path, naming, num_shards):
    tensors = deepseek_tensors()
    named = {NAMINGS[naming](key): tensor for key, tensor in tensors.items()}
    path = write(tmp_path / "c", named, num_shards=num_shards)
    report = load_checkpoint(model := Tiny(), path)
    assert_holds(model, tensors)
    assert report.num_tensors == len(tensors)
    assert report.num_bytes == sum(t.numel() * t.itemsize for t in tensors.values())
    assert report.ignored == ()


@pytest.mark.parametrize("suffix", ["weight_scale", "scale"])
def test_other_scale_suffixes(tmp_path, suffix):
    tensors = deepseek_tensors()
    named = {key.replace("weight_scale_inv", suffix): value for key, value in tensors.items()}
    assert_loads(write(tmp_path / "c", named), tensors)


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


def test_fused_keys_of_our_own_state_dict(tmp_path):
    torch.manual_seed(3)
    source, model = Tiny(), Tiny()
    save_file(source.state_dict(), tmp_path / "own.safetensors")
    load_checkpoint(model, tmp_path / "own.safetensors")
    for name, tensor in source.state_dict().items():
        assert bytes_of(tensor) == bytes_of(model.state_dict()[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fused_keys_of_compressed_tensors(tmp_path, dtype):
    source, model = Tiny(1), Tiny(1)
    tensors = source.state_dict()
    scales = {key for key in tensors if key.endswith("_scale_inv")}
    stored = {
        key.removesuffix("_inv"): tensor.to(dtype) if key in scales else tensor
        for key, tensor in tensors.items()
    }
    load_checkpoint(model, write(tmp_path / "c", stored))
    for key, tensor in tensors.items():
        wanted = tensor.to(dtype).float() if key in scales else tensor
        assert bytes_of(model.state_dict()[key]) == bytes_of(wanted), key


def test_large_tensors_are_read_in_pieces(tmp_path):
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.direct = nn.Parameter(torch.zeros(5000, 4001))
            self.cast = nn.Parameter(torch.zeros(5000, 4001, dtype=torch.float64))
            self.strided = nn.Parameter(torch.zeros(64, 128).T)

    tensors = {
        "direct": torch.randn(5000, 4001),
        "cast": torch.randn(5000, 4001),
        "strided": torch.randn(128, 64),
    }
    model = Big()
    load_checkpoint(model, write(tmp_path / "c", tensors))
    assert torch.equal(model.direct, tensors["direct"])
    assert torch.equal(model.cast, tensors["cast"].double())
    assert torch.equal(model.strided, tensors["strided"])


def test_own_storage_is_kept(tmp_path):
    model = Tiny()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    load_checkpoint(model, write(tmp_path / "c", deepseek_tensors(scale_dtype=torch.bfloat16)))
    assert before == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


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


@pytest.mark.parametrize("stored", ["lm_head.weight", "model.embed_tokens.weight", "both"])
def test_one_name_of_a_tied_tensor_is_enough(tmp_path, stored):
    tensors = deepseek_tensors()
    wanted = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = wanted.clone()
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    for name in names if stored != "both" else []:
        if name != stored:
            del tensors[name]
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


def test_ordinary_tensors_take_the_models_dtype(tmp_path):
    tensors = deepseek_tensors()
    key = "model.layers.0.norm.weight"
    tensors[key] = torch.randn(H)
    model = Tiny()
    load_checkpoint(model, write(tmp_path / "c", tensors))
    assert torch.equal(model.model.layers[0].norm.weight, tensors[key].bfloat16())


def test_load_after_load_replaces_all(tmp_path):
    first, second = deepseek_tensors(), deepseek_tensors()
    second = {key: tensor.flip(0).contiguous() for key, tensor in second.items()}
    load_checkpoint(model := Tiny(), write(tmp_path / "a", first))
    assert_loads(write(tmp_path / "b", second, num_shards=2), second, model)


def test_compressed_tensors_block_scheme(tmp_path):
    tensors = deepseek_tensors()
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }
    named = {key.replace("_scale_inv", "_scale"): value for key, value in tensors.items()}
    path = write(tmp_path / "c", named, {**CONFIG, "quantization_config": quantization})
    assert_loads(path, tensors)
    assert read_config(path)["quantization_config"] == quantization


class Plain(nn.Module):
    """`Tiny`'s kv_a_proj_with_mqa before it was converted, and a linear that stays BF16."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(H, 576, bias=False, dtype=torch.bfloat16)
        self.b = nn.Linear(H, 8, bias=False, dtype=torch.bfloat16)


def test_fp8_modules_tell_convert_what_to_swap(tmp_path):
    tensors = {**fp8_pair("a", 576, H), "b.weight": torch.randn(8, H, dtype=torch.bfloat16)}
    config = copy.deepcopy(CONFIG)
    config["quantization_config"]["modules_to_not_convert"] = ["a"]  # such lists drift
    path = write(tmp_path / "c", tensors, config)
    assert fp8_modules(path) == ["a"]
    with torch.device("meta"):
        model = Plain()
    convert(model, only=fp8_modules(path))
    load_checkpoint(model, path)
    assert isinstance(model.a, FP8Linear)
    assert not isinstance(model.b, FP8Linear)
    for key, tensor in tensors.items():
        assert bytes_of(model.state_dict()[key]) == bytes_of(tensor)


def test_fp8_modules_speak_the_models_names(tmp_path):
    tensors = {minimax_name(key): tensor for key, tensor in deepseek_tensors(1).items()}
    path = write(tmp_path / "c", tensors)
    stored, own = fp8_modules(path), fp8_modules(path, model=Tiny(1))
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
