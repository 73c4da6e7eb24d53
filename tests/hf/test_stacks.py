"""Stacked experts of any I: what is saved loads to the same bits, by each loader.

Gate and up have blocks of their own. Where I mod 128 is above 64, all 2I rows have as many blocks,
so that config.json has to say it.
"""

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, FineGrainedFP8Config

import moefp8
from benchmarks.families.models import tiny_model
from moefp8 import GroupedExperts
from moefp8.checkpoint import inspect_checkpoint, quantize_checkpoint
from tests.checkpoint.cases import assert_same_tensors, refusal
from tests.checkpoint.quantize.cases import quantization_of
from tests.checkpoint.transformers_cases import assert_equal, fp8_of
from tests.hf.model_cases import RELEASE, change_config, tensors_of
from tests.sampling import ALL_KERNELS

pytestmark = pytest.mark.skipif(
    RELEASE < (5, 20), reason="older transformers build no tiny model of these"
)

ODD = {"moe_intermediate_size": 100}
FAMILIES = {
    "dbrx": {"ffn_config": {"ffn_hidden_size": 200}},
    "granitemoe": {"intermediate_size": 96},
    "hy_v4_vl_text": {"moe_intermediate_size": 352},
    "mistral4": {"moe_intermediate_size": 160},  # here scales alone tell
    "mixtral": {"intermediate_size": 120},  # experts one by one
    "qwen3_vl_moe_text": {"moe_intermediate_size": 120},
    "step3p7": {"text_config": ODD},  # its conversions rename scales alone
    "zaya": {"moe_intermediate_size": 224},
}
MORE = {  # of classes like these, or slow
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [352, 192]}},
    "glm4v_moe_text": ODD,
    "granitemoe_swa": {"intermediate_size": 224},
    "granitemoehybrid": {"intermediate_size": 72},
    "granitemoeshared": {"intermediate_size": 65},
    "hy_v4": {"moe_intermediate_size": 200},
    "hy_v4_vl": {"text_config": ODD},
    "inkling_text": {"moe_intermediate_size": 224},
    "lara_mini": ODD,
    "qwen3_vl_moe": {"text_config": ODD},
}
SIZES = FAMILIES | MORE


def sampled(*names: str) -> list[str]:
    """These families, or all with MOEFP8_TEST_ALL_KERNELS=1, as far as transformers knows them."""
    return [name for name in (SIZES if ALL_KERNELS else names) if name in CONFIG_MAPPING]


def experts_of(model: nn.Module) -> str:
    """The name of the last module of routed experts."""
    return [name for name, _ in model.named_modules() if name.endswith(".experts")][-1]


def assert_experts_load(path, model: nn.Module) -> nn.Module:
    """By transformers' loader, by ours into the experts alone, and by an inspection."""
    again = fp8_of(path, type(model))
    name = experts_of(model)
    wanted = model.get_submodule(name).state_dict()
    assert wanted["down_proj"].dtype == torch.float8_e4m3fn
    assert_same_tensors(again.get_submodule(name).state_dict(), wanted)
    assert [a for a in inspect_checkpoint(path).anomalies if a.severity == "error"] == []
    alone = nn.ModuleDict({"experts": GroupedExperts(*wanted["down_proj"].shape, device="meta")})
    keys = [key for key in tensors_of(path) if ".experts." in key]
    home = keys[-1].partition("experts.")[0]  # keys may have another prefix than names
    moefp8.load_checkpoint(
        alone,
        path,
        rename=lambda key: key.removeprefix(home),
        ignore=[key for key in tensors_of(path) if not key.startswith(f"{home}experts.")],
    )
    assert_same_tensors(alone["experts"].state_dict(), wanted)
    return again


@pytest.mark.parametrize("name", sampled(*FAMILIES))
def test_stacks_load_as_they_were_saved(name, tmp_path):
    model = tiny_model(name, changes=SIZES[name])
    moefp8.convert(model, only=None if ALL_KERNELS else experts_of(model))
    model.save_pretrained(tmp_path / "fp8")
    assert_equal(assert_experts_load(tmp_path / "fp8", model), model)
    FineGrainedFP8Config.from_dict(quantization_of(tmp_path / "fp8"))  # transformers' own takes it


@pytest.mark.skipif("hy_v4_vl_text" not in CONFIG_MAPPING, reason="transformers lacks it")
def test_stacks_of_directories_that_do_not_say_the_cut_load(tmp_path):
    """Each block of the right cut has the largest code; many of the wrong one lack it."""
    model = tiny_model("hy_v4_vl_text", changes={"moe_intermediate_size": 1352})
    weights = model.get_submodule(experts_of(model)).gate_up_proj.data
    weights *= torch.randn_like(weights) ** 6  # few values of a block are close to its largest
    moefp8.convert(model, only=experts_of(model))
    model.save_pretrained(tmp_path / "fp8")
    stored = quantization_of(tmp_path / "fp8")
    change_config(tmp_path / "fp8", quantization_config=without(stored, "gate_up_blocks"))
    assert_experts_load(tmp_path / "fp8", model)
    model.get_submodule(experts_of(model)).gate_up_proj.data.view(torch.uint8)[:] = 0x30
    model.save_pretrained(tmp_path / "other")
    change_config(tmp_path / "other", quantization_config=without(stored, "gate_up_blocks"))
    assert "nothing tells whether gate and up" in refusal(fp8_of, tmp_path / "other", type(model))
    assert not inspect_checkpoint(tmp_path / "other").is_loadable


def without(values: dict, name: str) -> dict:
    return {key: x for key, x in values.items() if key != name}


@pytest.mark.parametrize("name", sampled("hy_v4_vl_text"))
def test_stacks_load_as_convert_makes_them_once_files_are_quantized(name, tmp_path):
    model = tiny_model(name, changes=SIZES[name])
    model.save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8", progress=False)
    assert_experts_load(tmp_path / "fp8", moefp8.convert(model, only=experts_of(model)))


@pytest.mark.parametrize("name", sampled("mixtral", "granitemoe"))
def test_save_checkpoint_writes_what_all_loaders_read(name, tmp_path):
    model = tiny_model(name, changes=SIZES[name])
    moefp8.convert(model, only=experts_of(model))
    moefp8.save_checkpoint(model, tmp_path / "fp8")
    assert_equal(assert_experts_load(tmp_path / "fp8", model), model)
    with torch.device("meta"):
        again = moefp8.convert(tiny_model(name, changes=SIZES[name]), only=experts_of(model))
    again.model.rotary_emb = model.model.rotary_emb  # no checkpoint has it
    moefp8.load_checkpoint(again, tmp_path / "fp8")
    assert_equal(again, model)
