"""PEFT's functions around FP8 layers: the same numbers as ours, or an error before any change."""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import moefp8
from moefp8.adapters import add_lora, load_lora, register_with_peft, remove_lora, save_lora
from tests.adapters.cases import Net, error, tokens, trained
from tests.adapters.files_cases import change
from tests.adapters.peft_cases import Experts, Linears, drawn, lora_config, small_model

peft = pytest.importorskip("peft")
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
LAYERS = [
    (Linears, {"target_modules": ["first", "second"]}),
    (Linears, {"target_parameters": ["first.weight", "second.weight"]}),
    (Experts, {"target_parameters": STACKS}),
    (Experts, {"target_parameters": STACKS[:1], "use_rslora": True}),
    (Experts, {"target_parameters": STACKS[1:]}),
]


def wrapped(model: nn.Module, **settings) -> nn.Module:
    return peft.get_peft_model(model, lora_config(**settings))


def kinds(model: nn.Module) -> list[str]:
    return [type(x).__name__ for x in model.modules()]


def adapters_in(model: nn.Module) -> int:
    return sum(".lora_A." in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(("make", "settings"), LAYERS)
def test_peft_trains_what_we_load(make, settings, tmp_path):
    model, x = make(), tokens()
    other = copy.deepcopy(model)
    theirs = drawn(wrapped(model, **settings))
    theirs.save_pretrained(tmp_path)
    names = load_lora(other, tmp_path)
    y = theirs(x)
    y.float().square().sum().backward()
    trains = [x for x in theirs.parameters() if x.requires_grad]
    assert len(trains) == 2 * len(names)
    assert all(x.dtype == torch.float32 and x.grad.abs().sum() > 0 for x in trains)
    if make is Experts:
        assert torch.equal(other(x), y)
    else:  # PEFT's products are in FP32
        assert error(other(x), y) < 0.05
    for twin in (copy.deepcopy(theirs), pickle.loads(pickle.dumps(theirs))):
        assert torch.equal(twin(x), y)
    assert torch.equal(peft.PeftModel.from_pretrained(remove_lora(other), tmp_path)(x), y)


def test_gradients_of_experts_are_those_beside_our_adapters(tmp_path):
    model, x = Experts(), tokens()
    theirs = drawn(wrapped(copy.deepcopy(model), target_parameters=STACKS))
    theirs.save_pretrained(tmp_path)
    load_lora(model, tmp_path)
    for made in model, theirs:
        made(x).float().square().sum().backward()
    outer = theirs.get_submodule("base_model.model.experts")
    for layer, lora in (
        (outer, model.experts.lora_down_proj),
        (outer.base_layer, model.experts.lora_gate_up_proj),
    ):
        a, b = layer.lora_A.default.weight.grad, layer.lora_B.default.weight.grad
        assert torch.equal(a, lora.A.grad.flatten(0, 1))
        assert torch.equal(b, lora.B.grad.permute(1, 2, 0).flatten(1))


@pytest.mark.parametrize(("make", "settings"), LAYERS)
def test_adapters_are_switched_added_and_taken_off(make, settings, tmp_path):
    model, x = make(), tokens()
    before = model(x)
    double = copy.deepcopy(model)
    theirs = drawn(wrapped(model, **settings))
    theirs.save_pretrained(tmp_path)
    y = theirs(x)
    with theirs.disable_adapter():
        assert torch.equal(theirs(x), before)
    theirs.load_adapter(tmp_path, "again")
    theirs.base_model.set_adapter(["default", "again"])
    change(tmp_path, lora_alpha=16)
    load_lora(double, tmp_path)
    assert error(theirs(x), y) > 0.05
    assert error(theirs(x), double(x)) < 0.05
    assert torch.equal(theirs.unload()(x), before)


@pytest.mark.parametrize(("make", "settings"), LAYERS)
def test_peft_merges_only_what_is_dequantized(make, settings):
    model, x = make(), tokens()
    codes = {name: x.clone() for name, x in model.state_dict().items()}
    theirs = drawn(wrapped(model, **settings))
    y = theirs(x)
    for merge in (theirs.merge_and_unload, theirs.merge_adapter):
        with pytest.raises(ValueError, match=r"moefp8.dequantize\(model\) gives BF16 weights"):
            merge()
    for name, tensor in copy.deepcopy(theirs).unload().state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), codes[name].view(torch.uint8))
    plain = moefp8.dequantize(theirs)
    assert error(plain(x), y) < 0.06
    assert error(plain.merge_and_unload()(x), y) < 0.06


def test_adapters_beside_master_weights_are_added_to_them():
    model = Experts()
    x, theirs = tokens(), drawn(wrapped(copy.deepcopy(model), target_parameters=STACKS))
    y = theirs(x)
    assert error(moefp8.unfreeze(theirs)(x), y) < 0.1 < error(model(x), y)


def test_shared_experts_of_moe_take_adapters_of_peft():
    model, x = Net(), tokens()
    theirs = drawn(wrapped(model, target_modules=["up_proj", "down_proj"]))
    y = theirs(x)
    assert error(moefp8.dequantize(theirs)(x), y) < 0.1


def test_all_linear_is_all_of_a_module_of_ours():
    model, x = Net(), tokens()
    names = add_lora(copy.deepcopy(model), targets="all-linear")
    assert len(names) == 1 + 2 + 3 + 1  # among them the head, as the module does not say it is one
    config = lora_config(target_modules="All-Linear")
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    assert adapters_in(theirs) == len(names)
    theirs(x).float().square().sum().backward()
    assert all(x.grad is not None for x in theirs.parameters() if x.requires_grad)
    first = set(config.target_modules), set(config.target_parameters)
    second = lora_config(target_modules="all-linear")
    theirs.add_adapter("second", second)
    assert adapters_in(theirs) == 2 * len(names)
    assert (set(second.target_modules), set(second.target_parameters)) == first
    settings = {"target_modules": "all-linear", "exclude_modules": ["experts", "up_proj"]}
    assert adapters_in(wrapped(model, **settings)) == len(names) - 2 - 1


def test_a_config_is_registered_for_the_tuner_itself():
    model, x = Linears(), tokens()
    before = model(x)
    config = register_with_peft(lora_config(target_modules=["first"]))
    theirs = peft.LoraModel(model, config, "default")
    assert torch.equal(theirs(x), before)
    assert adapters_in(theirs) == 1


# ---- What is refused ----


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target_modules": "all-linear", "lora_dropout": 0.1}, "lora_dropout must be 0.0"),
        ({"target_modules": ["first"], "use_dora": True}, r"use_dora=.*moefp8\.dequantize"),
        ({"target_modules": ["experts"]}, r"'moe.experts.gate_up_proj', 'moe.experts.down_proj'"),
    ],
)
def test_peft_is_refused_before_anything_changes(settings, told):
    model = Net()
    before = kinds(model)
    with pytest.raises(ValueError, match=rf"^peft: .*{told}"):
        wrapped(model, **settings)
    assert kinds(model) == before


def test_peft_is_refused_beside_adapters_of_ours():
    model = Net()
    add_lora(model, targets=["first"])
    before = kinds(model)
    with pytest.raises(ValueError, match=r"moefp8\.adapters\.remove_lora\(model\)"):
        wrapped(model, target_modules=["head"])
    assert kinds(model) == before


def test_experts_with_hooks_are_refused():
    model = Experts()
    model.experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"peft: experts \(GroupedExperts\) must have no hooks"):
        wrapped(model, target_parameters=STACKS)


def test_variants_are_peft_s_own_beside_what_is_not_fp8():
    theirs = wrapped(Net(), target_modules=["head"], use_dora=True)
    assert theirs(tokens()).isfinite().all()


def test_a_model_without_linears_has_no_all_linear():
    with pytest.raises(ValueError, match="must have linears or experts"):
        add_lora(nn.Sequential(nn.ReLU()), targets="all-linear")


def test_a_peft_that_lacks_names_gives_a_warning_and_stays_usable(tmp_path):
    (tmp_path / "peft.py").write_text("value = 3")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    script = "import peft, moefp8; print(peft.value)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "3\n"
    assert "this release of PEFT cannot be told of FP8 layers" in done.stderr


# ---- Models of transformers ----


IDS = torch.arange(10)[None]
KINDS = ["qwen3_moe", "deepseek_v3", "qwen3"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_all_linear_is_the_same_in_peft_and_in_add_lora(kind, tmp_path):
    model = moefp8.convert(small_model(kind, 2))
    without, ours = model(IDS).logits, copy.deepcopy(model)
    names = add_lora(copy.deepcopy(model), targets="all-linear")
    theirs = drawn(wrapped(model, target_modules="all-linear"))
    y = theirs(IDS).logits
    theirs.save_pretrained(tmp_path)
    assert load_lora(ours, tmp_path) == names
    assert not any("lm_head" in name for name in names)
    assert error(ours(IDS).logits, y) < 0.25 * error(without, y)
    theirs(input_ids=IDS, labels=IDS).loss.backward()
    trains = [x for x in theirs.parameters() if x.requires_grad]
    assert len(trains) == 2 * len(names)
    assert all(x.grad.abs().sum() > 0 for x in trains)


@pytest.mark.filterwarnings("ignore")
def test_all_linear_of_a_dense_model_is_what_peft_takes_before_conversion():
    model = small_model("qwen3", 2)
    theirs = wrapped(copy.deepcopy(model), target_modules="all-linear")
    layers = [x for x, y in theirs.base_model.model.named_modules() if hasattr(y, "lora_A")]
    assert add_lora(moefp8.convert(model), targets="all-linear") == layers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_peft_and_transformers_load_our_files_beside_fp8(kind, tmp_path):
    hf = pytest.importorskip("moefp8.hf")
    transformers = pytest.importorskip("transformers")
    small_model(kind, 2).save_pretrained(tmp_path / "model")

    def loaded():
        auto = transformers.AutoModelForCausalLM
        return auto.from_pretrained(tmp_path / "model", quantization_config=hf.FP8Config())

    ours = loaded()
    without = ours(IDS).logits
    names = add_lora(ours, 4, 8)
    save_lora(trained(ours, 0.1), tmp_path / "adapter")
    y = ours(IDS).logits
    theirs = peft.PeftModel.from_pretrained(loaded(), tmp_path / "adapter")
    by_transformers = loaded()
    by_transformers.load_adapter(str(tmp_path / "adapter"))
    assert adapters_in(theirs) == adapters_in(by_transformers) == len(names)
    assert torch.equal(theirs(IDS).logits, by_transformers(IDS).logits)
    assert error(theirs(IDS).logits, y) < 0.25 * error(without, y)
    theirs.save_pretrained(tmp_path / "again")
    settings = [
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("adapter", "again")
    ]
    first, again = (set(x.get("target_parameters") or ()) for x in settings)
    assert first == again
    assert load_lora(remove_lora(ours), tmp_path / "again") == names
    assert torch.equal(ours(IDS).logits, y)
