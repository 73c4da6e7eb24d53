"""PEFT reads our files, we read PEFT's; FP8 codes it never changes."""

import pytest
import torch
from torch import nn

import moefp8
from moefp8.adapters import add_lora, load_lora, register_with_peft, save_lora
from tests.adapters.cases import H, error, tokens, trained
from tests.adapters.peft_cases import Experts, Linears, dequantized, drawn, lora_config, small_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Linears, {}),
        (Linears, {"targets": ["second"], "use_rslora": True}),
        (Experts, {}),
        (Experts, {"targets": ["gate_up_proj"]}),
        (Experts, {"targets": ["down_proj"]}),
    ],
)
def test_peft_reads_our_files_and_merges_them(make, options, tmp_path):
    model, x = make(), tokens()
    add_lora(model, 4, 8, **options)
    trained(model, 0.2)
    save_lora(model, tmp_path)
    plain = dequantized(model)
    without = plain(x)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path)
    y = model(x)
    assert error(theirs(x), y) < 0.06
    assert error(without, y) > 0.2
    assert error(theirs.merge_and_unload()(x), y) < 0.06


def test_peft_adapts_no_module_whose_name_ends_as_that_of_another(tmp_path):
    """It takes "0" for the end of "1.0", and that is a norm."""
    inner = nn.Sequential(nn.RMSNorm(40), nn.Linear(40, 8)).bfloat16()
    model, x = nn.Sequential(moefp8.FP8Linear(H, 40), inner), tokens()
    add_lora(model, 4, 8)
    save_lora(trained(model, 0.2), tmp_path)
    theirs = peft.PeftModel.from_pretrained(dequantized(model), tmp_path)
    assert error(theirs(x), model(x)) < 0.06
    assert len([name for name, _ in theirs.named_parameters() if "lora_" in name]) == 2


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Linears, {"target_modules": ["first", "second"], "use_rslora": True}),
        (Linears, {"target_parameters": ["first.weight"]}),
        (Experts, {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
        (Experts, {"target_parameters": ["experts.down_proj"]}),
        (
            Linears,
            {
                "target_modules": ["first", "second"],
                "rank_pattern": {"second": 2},
                "alpha_pattern": {"fir.*": 16, "first": 1},
            },
        ),
        (
            Experts,
            {
                "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
                "rank_pattern": {r".*\.gate_up_proj": 8},
                "alpha_pattern": {r".*\.gate_up_proj": 16},
            },
        ),
    ],
)
# PEFT looks for these keys among modules alone, though it applies them to parameters too.
@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning:peft.tuners"
)
def test_we_read_files_of_peft(make, settings, tmp_path):
    model, x = make(), tokens()
    theirs = drawn(peft.get_peft_model(dequantized(model), lora_config(**settings)))
    theirs.save_pretrained(tmp_path)
    without = model(x)
    load_lora(model, tmp_path)
    assert error(model(x), theirs(x)) < 0.06
    assert error(model(x), without) > 0.2
    save_lora(model, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(dequantized(model), tmp_path / "again")
    assert error(again(x), theirs(x)) < 0.01


@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}],
)
def test_variants_that_read_the_weight_are_refused(settings):
    with pytest.raises(ValueError, match=f"register_with_peft: {next(iter(settings))}"):
        register_with_peft(lora_config(**settings))


def test_other_configs_are_refused():
    with pytest.raises(TypeError, match=r"must be a peft\.LoraConfig, got dict"):
        register_with_peft({})


# ---- Models of transformers ----


@pytest.mark.filterwarnings("ignore")
def test_peft_reads_adapters_of_whole_models(tmp_path):
    """Dense layers and shared experts have names that PEFT takes for those of experts."""
    model, ids = moefp8.convert(small_model("deepseek_v3", 2)), torch.arange(10)[None]
    names = add_lora(model, 4, 8)
    trained(model, 0.1)
    save_lora(model, tmp_path)
    plain = dequantized(model)
    y, without = model(ids).logits, plain(ids).logits
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path)
    wrappers = [x for x in theirs.modules() if isinstance(x, peft.tuners.lora.LoraLayer)]
    assert len(wrappers) == len(names)
    assert error(theirs(ids).logits, y) < 0.5 * error(without, y)


@pytest.mark.filterwarnings("ignore")
def test_experts_by_name_refuse_target_parameters():
    """Their FP8 weights are made once, of parameters that PEFT replaces for each call."""
    pytest.importorskip("moefp8.hf")
    model, ids = small_model("qwen3_moe", 1), torch.arange(10)[None]
    model.set_experts_implementation("moefp8")
    model(ids)
    config = lora_config(target_modules=[], target_parameters=["experts.gate_up_proj"])
    theirs = peft.get_peft_model(model, config)
    with pytest.raises(ValueError, match=r"parametrized.*moefp8\.adapters\.add_lora"):
        theirs(ids)


@pytest.mark.filterwarnings("ignore")
def test_we_read_what_peft_writes_of_experts_that_target_modules_names(tmp_path):
    """It then gives gate and up, which are one weight, an adapter of twice the rank."""
    model, ids = moefp8.convert(small_model("qwen3_moe", 2)), torch.arange(10)[None]
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = drawn(peft.get_peft_model(dequantized(model), lora_config(target_modules=names)))
    theirs.save_pretrained(tmp_path)
    without = model(ids).logits
    assert len(load_lora(model, tmp_path)) == 2 * 3
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert (experts.lora_gate_up_proj.rank, experts.lora_down_proj.rank) == (8, 4)
    y = theirs(ids).logits
    assert error(model(ids).logits, y) < 0.5 * error(without, y)
