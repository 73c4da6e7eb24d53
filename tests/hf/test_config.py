"""`FP8Config`: transformers' keywords with their meaning, and what is written to config.json."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_checkpoint import small_config
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GraniteMoeConfig,
    Qwen2MoeConfig,
)
from transformers.quantizers.quantizers_utils import should_convert_module

import moefp8
from moefp8 import GroupedExperts, convert
from moefp8.checkpoint import CheckpointError, inspect_checkpoint, quantize_checkpoint
from moefp8.hf import FP8Config
from tests.checkpoint.cases import assert_same_tensors
from tests.checkpoint.quantize.cases import quantization_of
from tests.checkpoint.transformers_cases import assert_equal, fp8_of, saved
from tests.hf.model_cases import RELEASE, SIZES, change_config, fp8_names, plain, prompt, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = Path(__file__).parent.parent
CONFIGS = {
    "qwen3_moe": lambda: small_config("qwen3_moe"),
    "deepseek_v3": lambda: small_config("deepseek_v3"),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=128, shared_expert_intermediate_size=256
    ),
}
if RELEASE >= (5, 17):  # before, its experts were a class of their own; convert says so
    CONFIGS["granitemoe"] = lambda: GraniteMoeConfig(
        **SIZES, intermediate_size=384, num_local_experts=4
    )


def test_skip_and_modules_to_not_convert_add_to_the_defaults(bf16):
    everything = fp8_names(fp8_of(bf16))
    assert "lm_head" not in everything
    for model in (fp8_of(bf16, skip="q_proj"), fp8_of(bf16, modules_to_not_convert=["q_proj"])):
        assert fp8_names(model) == {name for name in everything if "q_proj" not in name}
    model = fp8_of(bf16, skip="experts", modules_to_not_convert=["k_proj"])
    assert not any("k_proj" in name or "experts" in name for name in fp8_names(model))


def test_the_arguments_of_convert(bf16):
    assert fp8_names(fp8_of(bf16, only="layers.0")) == {
        name for name in fp8_names(fp8_of(bf16)) if "layers.0." in name
    }
    by_filter = fp8_of(bf16, filter_fn=lambda module, name: name.endswith("o_proj"))
    assert {name.rpartition(".")[2] for name in fp8_names(by_filter)} == {"o_proj"}
    model = fp8_of(bf16, overrides={"*.experts": {"layout": "masked"}})
    layouts = {m.layout for m in model.modules() if isinstance(m, GroupedExperts)}
    assert layouts == {"masked"}
    assert "lm_head" in model.hf_quantizer.conversion.kept


@pytest.mark.parametrize(
    "keyword",
    [
        {"activation_scheme": "static"},
        {"weight_block_size": (64, 64)},
        {"weight_block_size": None},
        {"weight_block_size": 128},
        {"dequantize": True},
        {"modules_to_convert": ["embed_tokens"]},
        {"scale_fmt": "ue8m0"},
        {"expert_dtype": "fp4"},
    ],
    ids=str,
)
def test_what_moefp8_does_not_do_is_refused(keyword):
    (name,) = keyword
    with pytest.raises(ValueError, match=f"FP8Config: {name} must be "):
        FP8Config(**keyword)


def test_what_is_transformers_default_is_taken():
    theirs = FineGrainedFP8Config()
    names = "activation_scheme weight_block_size dequantize modules_to_not_convert"
    names += " modules_to_convert scale_fmt expert_dtype"
    FP8Config(**{name: getattr(theirs, name) for name in names.split() if hasattr(theirs, name)})


@pytest.mark.parametrize(
    "given",
    [
        {"skip": "q_proj"},
        {"only": "layers.0"},
        {"modules_to_not_convert": ["q_proj"]},
        {"overrides": {"q_proj": False}},
        {"filter_fn": lambda module, name: True},
    ],
    ids=lambda given: str(*given),
)
def test_what_a_checkpoint_in_fp8_decides_itself_is_told(given, bf16, fp8):
    with pytest.warns(UserWarning, match=r"is FP8 already.*moefp8\.dequantize\(model\.part\)"):
        model = fp8_of(fp8, **given)
    assert_equal(model, fp8_of(bf16))


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError, match=r"^FP8Config\.__init__\(\) .*typo"):
        FP8Config(typo=1)


def test_it_shows_what_it_was_given():
    assert repr(FP8Config()) == repr(FP8Config(skip=None)) == "FP8Config()"
    assert repr(FP8Config(None, modules_to_not_convert="a")) == "FP8Config(skip=('a',))"
    assert repr(FP8Config("q_proj", only=["a"])) == "FP8Config(skip=('q_proj',), only=('a',))"


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_what_is_saved_says_what_stayed_and_loads_everywhere(family, tmp_path):
    original = saved(CONFIGS[family](), tmp_path / "bf16")
    model = fp8_of(tmp_path / "bf16")
    model.save_pretrained(tmp_path / "fp8")
    kept = quantization_of(tmp_path / "fp8")["modules_to_not_convert"]
    ours = fp8_names(model)
    for name, module in model.named_modules():
        if name in ours:
            assert should_convert_module(name, kept), name
        elif type(module) is torch.nn.Linear:
            assert not should_convert_module(name, kept), name
    assert not [a for a in inspect_checkpoint(tmp_path / "fp8").anomalies if a.severity == "error"]
    assert_equal(fp8_of(tmp_path / "fp8"), model)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "files", progress=False)
    assert_equal(fp8_of(tmp_path / "files"), model)
    assert tensors_of(tmp_path / "files").keys() == tensors_of(tmp_path / "fp8").keys()
    if family == "qwen2_moe":  # whole blocks and no stacks: transformers can dequantize it
        dequantize = FineGrainedFP8Config(dequantize=True)
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / "fp8", quantization_config=dequantize, dtype=torch.bfloat16
        )
        ids = prompt()
        wanted, got = original(ids).logits, theirs(ids).logits
        assert (got - wanted).norm() / wanted.norm() < 0.15


@pytest.fixture
def own_fp8(fp8, tmp_path):
    """A copy of `fp8` that a test may change."""
    return shutil.copytree(fp8, tmp_path / "fp8")


@pytest.mark.parametrize(
    "extra",
    [{"skip": 5}, {"only": [1]}, {"filter_fn": "x"}, {"stored": 7}, {"kept": {}}],
    ids=str,
)
def test_keys_of_a_config_are_no_arguments(bf16, own_fp8, extra):
    """Keys come from a file that anybody wrote; what they do not change is given back."""
    change_config(own_fp8, quantization_config=quantization_of(own_fp8) | extra)
    model = fp8_of(own_fp8)
    assert_equal(model, fp8_of(bf16))
    model.save_pretrained(own_fp8 / "copy")
    assert quantization_of(own_fp8 / "copy") == quantization_of(own_fp8)


def test_a_config_s_own_words_are_cut_and_escaped(tmp_path):
    weights = {"strategy": "\x1b]0;x\x07" * 1000, "block_structure": "\x1b[2J" * 100_000}
    groups = {str(i): {"weights": weights} for i in range(3)}
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    config = {"model_type": "llama", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must be \\[128, 128\\], got") as caught:
        moefp8.hf.pretrained_config(str(tmp_path))
    message = str(caught.value)
    assert len(message) < 1000
    assert message.isprintable()


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("../other/x.safetensors", r"x\.safetensors: must lie in .*/fp8"),
        ("absolute", r"x\.safetensors: must lie in .*/fp8"),
        ("model.safetensors", r"model\.safetensors: a link out of the checkpoint, to .*/other/x\."),
        ("sub/x.safetensors", r"sub/x\.safetensors: a link out of the checkpoint, to .*/other/x\."),
    ],
)
def test_neither_an_index_nor_a_link_leads_to_another_directory(own_fp8, place, rule):
    file, other = own_fp8 / "model.safetensors", own_fp8.parent / "other" / "x.safetensors"
    keys = tensors_of(own_fp8)
    other.parent.mkdir()
    file.rename(other)
    if place == file.name:
        file.symlink_to(other)
    else:
        (own_fp8 / "sub").symlink_to(other.parent)
        name = str(other) if place == "absolute" else place
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(keys, name)}
        (own_fp8 / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rule):
        fp8_of(own_fp8)


def test_a_converted_model_is_saved_as_a_loaded_one(bf16, fp8, tmp_path):
    model = convert(plain(bf16))
    model.save_pretrained(tmp_path / "converted")
    assert quantization_of(tmp_path / "converted") == quantization_of(fp8)
    assert_same_tensors(tensors_of(tmp_path / "converted"), tensors_of(fp8))
    assert_equal(fp8_of(tmp_path / "converted"), model)


UNPLUGGED = """
import sys, torch, moefp8
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
moefp8.convert(model)
assert "moefp8.hf" not in sys.modules
try:
    model.save_pretrained(sys.argv[2])
except ValueError as error:
    print(error)
"""


def test_without_the_plug_in_saving_is_refused(bf16, tmp_path):
    command = [sys.executable, "-c", UNPLUGGED, bf16, tmp_path / "converted"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "import moefp8.hf before moefp8.convert(model)" in done.stdout
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("part", ["model", "model.layers.0", "model.layers.1.mlp.experts"])
def test_a_model_of_which_a_part_was_converted_is_not_saved_as_weights(bf16, tmp_path, part):
    model = plain(bf16)
    model.set_submodule(part, convert(model.get_submodule(part)))
    with pytest.raises(ValueError, match="convert or freeze the model as a whole"):
        model.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    assert model.state_dict().keys()  # anybody else may ask
    moefp8.dequantize(model)
    model.save_pretrained(tmp_path / "plain")
    plain(tmp_path / "plain")


def test_converted_twice(bf16, tmp_path):
    """What the second call swaps is saved too, and is no longer listed as kept."""
    model = fp8_of(bf16, skip="q_proj")
    convert(model, only="*.q_proj")
    model.save_pretrained(tmp_path / "copy")
    assert_equal(fp8_of(tmp_path / "copy"), fp8_of(bf16))
    kept = quantization_of(tmp_path / "copy")["modules_to_not_convert"]
    assert not any("q_proj" in name for name in kept)


@pytest.mark.parametrize("name", ["skip", "only", "modules_to_not_convert"])
def test_what_is_no_name_of_modules_is_refused(name):
    with pytest.raises(TypeError, match=f"FP8Config: {name} must be a name, or names, .*got 5"):
        FP8Config(**{name: 5})
