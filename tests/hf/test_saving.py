"""What config.json says is true of the model when it is saved, however it came to be so."""

import copy

import pytest
import torch
from small_checkpoint import small_config
from transformers import AutoModelForCausalLM, PreTrainedModel

import moefp8
from moefp8 import FP8Linear, GroupedExperts, convert
from moefp8.hf import FP8Config
from tests.checkpoint.quantize.cases import quantization_of
from tests.hf.model_cases import states_differ, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FP8 = FP8Linear | GroupedExperts
ATTENTION = "model.layers.1.self_attn.q_proj"
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen") / "bf16"
    torch.manual_seed(0)
    config = small_config("qwen3_moe")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def fp8(bf16):
    path = bf16.with_name("fp8")
    load(bf16).save_pretrained(path)
    return path


def load(path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=FP8Config())


def plain(path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def fp8_names(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, FP8)}


def assert_saves_what_it_is(model: PreTrainedModel, path) -> None:
    model.save_pretrained(path)
    kept = quantization_of(path)["modules_to_not_convert"]
    linears = {n for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert linears <= set(kept)
    assert not fp8_names(model) & set(kept)
    again = load(path)
    assert fp8_names(again) == fp8_names(model)
    assert states_differ(again, model) == []


def put(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


@pytest.mark.parametrize("source", ["bf16", "fp8", "converted"])
@pytest.mark.parametrize("part", ["model.layers.0", EXPERTS, ATTENTION])
def test_a_part_that_was_dequantized(source, part, bf16, fp8, tmp_path):
    model = convert(plain(bf16)) if source == "converted" else load({"bf16": bf16}.get(source, fp8))
    put(model, part, moefp8.dequantize(model.get_submodule(part)))
    if part == "model.layers.0":
        assert model.config.quantization_config.quant_method == "moefp8"
    assert_saves_what_it_is(model, tmp_path / "saved")
    assert any(
        part in name for name in quantization_of(tmp_path / "saved")["modules_to_not_convert"]
    )


@pytest.mark.parametrize("source", ["bf16", "fp8"])
def test_a_linear_that_was_put_back(source, bf16, fp8, tmp_path):
    model = load({"bf16": bf16, "fp8": fp8}[source])
    put(model, ATTENTION, model.get_submodule(ATTENTION).to_linear())
    assert_saves_what_it_is(model, tmp_path / "saved")


def test_a_part_that_was_converted_besides(bf16, tmp_path):
    model = plain(bf16)
    convert(model, only="model.layers.0")
    assert_saves_what_it_is(model, tmp_path / "one")
    convert(model.model.layers[1])
    assert_saves_what_it_is(model, tmp_path / "two")


def test_a_part_that_was_swapped_by_hand_besides(bf16, tmp_path):
    model = plain(bf16)
    convert(model, only="model.layers.0")
    put(model, ATTENTION, FP8Linear.from_linear(model.get_submodule(ATTENTION)))
    assert_saves_what_it_is(model, tmp_path / "saved")


@pytest.mark.parametrize("source", ["bf16", "fp8"])
@pytest.mark.parametrize("way", ["by part", "by hand", "base"])
def test_nothing_is_left_of_fp8(source, way, bf16, fp8, tmp_path):
    model = load({"bf16": bf16, "fp8": fp8}[source])
    if way == "base":
        moefp8.dequantize(model.model)
        model.model.save_pretrained(tmp_path / "base")
        assert "quantization_config" not in (tmp_path / "base" / "config.json").read_text()
    elif way == "by part":
        for layer in model.model.layers:
            moefp8.dequantize(layer)
    else:
        for name in fp8_names(model):
            put(model, name, moefp8.dequantize(model.get_submodule(name)))
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert tensors_of(tmp_path / "saved").keys() == tensors_of(bf16).keys()
    assert states_differ(plain(tmp_path / "saved"), model) == []


def test_a_checkpoint_s_own_lists_come_back_once_it_is_as_it_was(fp8, tmp_path):
    model = load(fp8)
    twin = copy.deepcopy(model.get_submodule(ATTENTION))
    put(model, ATTENTION, twin.to_linear())
    model.save_pretrained(tmp_path / "changed")
    assert quantization_of(tmp_path / "changed") != quantization_of(fp8)
    put(model, ATTENTION, twin)
    model.save_pretrained(tmp_path / "saved")
    assert quantization_of(tmp_path / "saved") == quantization_of(fp8)


def swap_by_hand(model: PreTrainedModel, what: str) -> None:
    module = model.get_submodule(what)
    if what == EXPERTS:
        put(model, what, GroupedExperts.from_weights(module.gate_up_proj, module.down_proj))
    else:
        put(model, what, FP8Linear.from_linear(module))


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


@pytest.mark.parametrize("source", ["bf16", "fp8"])
def test_transformers_own_dequantize(source, bf16, fp8, tmp_path):
    model = load({"bf16": bf16, "fp8": fp8}[source])
    wanted = moefp8.dequantize(load(fp8))
    assert model.dequantize() is model
    assert states_differ(model, wanted) == []
    assert not fp8_names(model)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert states_differ(plain(tmp_path / "saved"), model) == []
    assert load(fp8).dequantize(torch.float16).get_submodule(ATTENTION).weight.dtype == torch.half
