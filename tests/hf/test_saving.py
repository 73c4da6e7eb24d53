"""What config.json says is true of the model when it is saved, however it came to be so."""

import copy

import pytest
import torch
from small_checkpoint import small_config
from transformers import PreTrainedModel

import moefp8
from moefp8 import FP8Linear, GroupedExperts, convert
from tests.checkpoint.quantize.cases import quantization_of
from tests.checkpoint.transformers_cases import assert_equal, fp8_of
from tests.hf.model_cases import fp8_names, plain, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ATTENTION = "model.layers.1.self_attn.q_proj"
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(params=["from bf16", "from fp8", "converted"])
def model(request, bf16, fp8) -> PreTrainedModel:
    if request.param == "converted":
        return convert(plain(bf16))
    return fp8_of(bf16 if request.param == "from bf16" else fp8)


def assert_saves_what_it_is(model: PreTrainedModel, path) -> None:
    model.save_pretrained(path)
    kept = quantization_of(path)["modules_to_not_convert"]
    linears = {n for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert linears <= set(kept)
    assert not fp8_names(model) & set(kept)
    again = fp8_of(path)
    assert fp8_names(again) == fp8_names(model)
    assert_equal(again, model)


def assert_saves_as_plain(model: PreTrainedModel, path) -> None:
    model.save_pretrained(path)
    assert "quantization_config" not in (path / "config.json").read_text()
    assert_equal(plain(path), model)


@pytest.mark.parametrize("part", ["model.layers.0", EXPERTS, ATTENTION])
def test_a_part_that_was_dequantized(model, part, tmp_path):
    model.set_submodule(part, moefp8.dequantize(model.get_submodule(part)))
    if part == "model.layers.0":
        assert model.config.quantization_config.quant_method == "moefp8"
    assert_saves_what_it_is(model, tmp_path / "saved")
    assert any(
        part in name for name in quantization_of(tmp_path / "saved")["modules_to_not_convert"]
    )


def test_a_part_that_was_converted_besides(bf16, tmp_path):
    model = plain(bf16)
    convert(model, only="model.layers.0")
    assert_saves_what_it_is(model, tmp_path / "one")
    convert(model.model.layers[1])
    assert_saves_what_it_is(model, tmp_path / "two")


def test_a_part_that_was_swapped_by_hand_besides(bf16, tmp_path):
    model = plain(bf16)
    convert(model, only="model.layers.0")
    swap_by_hand(model, ATTENTION)
    assert_saves_what_it_is(model, tmp_path / "saved")


@pytest.mark.parametrize("way", ["by part", "by hand", "base"])
def test_nothing_is_left_of_fp8(model, way, bf16, tmp_path):
    if way == "base":
        moefp8.dequantize(model.model)
        model.model.save_pretrained(tmp_path / "base")
        assert "quantization_config" not in (tmp_path / "base" / "config.json").read_text()
    elif way == "by part":
        for layer in model.model.layers:
            moefp8.dequantize(layer)
    else:
        for name in fp8_names(model):
            model.set_submodule(name, moefp8.dequantize(model.get_submodule(name)))
    assert_saves_as_plain(model, tmp_path / "saved")
    assert tensors_of(tmp_path / "saved").keys() == tensors_of(bf16).keys()


def test_a_checkpoint_s_own_lists_come_back_once_it_is_as_it_was(fp8, tmp_path):
    model = fp8_of(fp8)
    twin = copy.deepcopy(model.get_submodule(ATTENTION))
    model.set_submodule(ATTENTION, twin.to_linear())
    model.save_pretrained(tmp_path / "changed")
    assert quantization_of(tmp_path / "changed") != quantization_of(fp8)
    model.set_submodule(ATTENTION, twin)
    model.save_pretrained(tmp_path / "saved")
    assert quantization_of(tmp_path / "saved") == quantization_of(fp8)


def swap_by_hand(model: PreTrainedModel, what: str) -> None:
    module = model.get_submodule(what)
    if what == EXPERTS:
        fp8 = GroupedExperts.from_weights(module.gate_up_proj, module.down_proj)
    else:
        fp8 = FP8Linear.from_linear(module)
    model.set_submodule(what, fp8)


@pytest.mark.parametrize("what", [EXPERTS, ATTENTION])
def test_modules_that_were_swapped_by_hand_are_not_saved_as_weights(what, bf16, tmp_path):
    model = plain(bf16)
    swap_by_hand(model, what)
    with pytest.raises(ValueError, match=r"import moefp8\.hf before moefp8\.convert") as caught:
        model.save_pretrained(tmp_path / "saved")
    assert "moefp8.save_checkpoint" in str(caught.value)
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    assert model.state_dict().keys()  # anybody else may ask
    convert(model, only=())  # the way out
    assert_saves_what_it_is(model, tmp_path / "saved")


def test_a_model_of_one_s_own_that_builds_fp8_modules_is_saved(bf16, tmp_path):
    kind = type(plain(bf16))

    class Own(kind):
        def __init__(self, config):
            super().__init__(config)
            swap_by_hand(self, ATTENTION)

    model = Own(small_config("qwen3_moe"))
    model.save_pretrained(tmp_path / "saved")
    assert tensors_of(tmp_path / "saved")[f"{ATTENTION}.weight"].dtype == torch.float8_e4m3fn


def test_transformers_own_dequantize(model, fp8, tmp_path):
    wanted = moefp8.dequantize(fp8_of(fp8))
    assert model.dequantize() is model
    assert_equal(model, wanted)
    assert not fp8_names(model)
    assert_saves_as_plain(model, tmp_path / "saved")
    assert fp8_of(fp8).dequantize(torch.float16).get_submodule(ATTENTION).weight.dtype == torch.half
