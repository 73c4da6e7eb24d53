"""Models of transformers whose FP8 modules hold master weights: training, saving, and back."""

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import moefp8
from moefp8 import FP8Linear, GroupedExperts, convert
from tests.checkpoint.quantize.cases import quantization_of
from tests.checkpoint.transformers_cases import assert_equal, fp8_of
from tests.hf.model_cases import fp8_names, plain, prompt, tensors_of
from tests.hf.test_saving import ATTENTION, EXPERTS, assert_saves_as_plain, assert_saves_what_it_is
from tests.hf.test_training import batch, changed, trained, trained_by_hand

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MODELS = "from bf16", "from fp8", "converted", "trainable"


@pytest.fixture(params=MODELS)
def model(request, bf16, fp8) -> PreTrainedModel:
    """All its FP8 modules are trainable."""
    if request.param == "trainable":
        return convert(plain(bf16), trainable=True)
    made = convert(plain(bf16)) if request.param == "converted" else None
    made = made or fp8_of(bf16 if request.param == "from bf16" else fp8)
    return moefp8.unfreeze(made)


def of_fp8(model: PreTrainedModel) -> list[Any]:
    return [x for x in model.modules() if isinstance(x, FP8Linear | GroupedExperts)]


def test_master_weights_are_saved_as_a_plain_model(model, bf16, tmp_path):
    assert all(x.trainable for x in of_fp8(model))
    assert_saves_as_plain(model, tmp_path / "saved")
    saved = tensors_of(tmp_path / "saved")
    assert saved.keys() == tensors_of(bf16).keys()
    assert {x.dtype for x in saved.values()} == {torch.bfloat16}
    assert_saves_as_plain(model, tmp_path / "again")


@pytest.mark.parametrize("saves_between", [False, True])
def test_a_frozen_model_is_saved_as_fp8(model, fp8, tmp_path, saves_between):
    if saves_between:
        model.save_pretrained(tmp_path / "plain")
    with torch.no_grad():
        model.get_submodule(ATTENTION).weight.mul_(1.5)
    moefp8.freeze(model)
    assert not any(x.trainable for x in of_fp8(model))
    assert_saves_what_it_is(model, tmp_path / "saved")
    assert tensors_of(tmp_path / "saved").keys() == tensors_of(fp8).keys()
    again = moefp8.unfreeze(fp8_of(tmp_path / "saved"))
    assert all(x.trainable for x in of_fp8(again))


@pytest.mark.parametrize("part", ["model.layers.0", EXPERTS, ATTENTION])
def test_a_part_that_trains_is_listed_as_not_fp8(model, part, tmp_path):
    moefp8.freeze(model)
    moefp8.unfreeze(model.get_submodule(part))
    model.save_pretrained(tmp_path / "saved")
    kept = quantization_of(tmp_path / "saved")["modules_to_not_convert"]
    trained_names = {name for name in fp8_names(model) if model.get_submodule(name).trainable}
    assert trained_names <= set(kept)
    again = fp8_of(tmp_path / "saved")
    assert fp8_names(again) == fp8_names(model) - trained_names
    for name in trained_names:
        moefp8.dequantize(model.get_submodule(name))
    state = model.state_dict()
    for name, x in again.state_dict().items():
        assert torch.equal(x.view(torch.uint8), state[name].view(torch.uint8)), name


def test_the_trainer_trains_them(model, tmp_path):
    model.train()
    expected = trained_by_hand(copy.deepcopy(model))
    before = {name: x.detach().clone().view(torch.uint8) for name, x in model.named_parameters()}
    quantizer = getattr(model, "hf_quantizer", None)
    assert quantizer is None or quantizer.is_qat_trainable
    after = trained(model, tmp_path)
    moved = changed(before, after)
    assert {f"{EXPERTS}.down_proj", f"{ATTENTION}.weight"} <= moved
    rows = [(after[name].view(-1), expected[name].view(-1)) for name in moved]
    assert all((x != y).float().mean() < 0.1 for x, y in rows)  # the order of rows rounds


def test_only_master_weights_may_train(fp8):
    model = fp8_of(fp8).requires_grad_(False)
    assert not model.hf_quantizer.is_qat_trainable
    moefp8.unfreeze(model)
    assert model.hf_quantizer.is_qat_trainable


def test_gradients_are_those_of_the_plain_model(bf16):
    """Those of routers are sums of small differences, and some tokens choose other experts.

    How far off they are depends on the batch and on how a CPU rounds its products in BF16.
    """
    ours, theirs = convert(plain(bf16), trainable=True), plain(bf16)
    for each in (ours, theirs):
        each.train()(batch(), labels=batch(), use_cache=False).loss.backward()
    named = dict(theirs.named_parameters())
    cosines = {
        name: torch.cosine_similarity(x.grad.float().view(-1), named[name].grad.float().view(-1), 0)
        for name, x in ours.named_parameters()
        if named[name].grad is not None and named[name].grad.any()
    }
    assert cosines.keys() == named.keys()
    routers = {name for name in cosines if name.endswith("mlp.gate.weight")}
    assert len(routers) == 3
    assert all(x > (0.7 if name in routers else 0.9) for name, x in cosines.items()), cosines
    assert torch.stack(list(cosines.values())).mean() > 0.95


def test_gradient_checkpointing_changes_no_bit(bf16):
    model = convert(plain(bf16), trainable=True).train()
    found = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(batch(), labels=batch(), use_cache=False).loss.backward()
        found.append({name: x.grad.clone() for name, x in model.named_parameters()})
        model.zero_grad()
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


def test_logits_of_both_forms_are_the_same(bf16):
    model = convert(plain(bf16), trainable=True).eval()
    ids = prompt()
    with torch.no_grad():
        logits = model(ids).logits
        moefp8.freeze(model)
        assert torch.equal(model(ids).logits, logits)
    assert_equal(model, convert(plain(bf16)))
