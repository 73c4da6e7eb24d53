"""`convert` with trainable=True: modules whose weights are the parameters that were there."""

import copy

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts, convert
from moefp8.layers import plan_conversion
from tests.layers.conversion.plain_experts import DbrxLike, PlainExperts

H = 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(H, H), nn.Linear(H, 4)
        self.experts = PlainExperts(4, H, 40)

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2)
        return self.experts(self.up(x), index, weights)


def test_parameters_stay_what_they_are():
    layer = Layer().bfloat16()
    before = dict(layer.named_parameters())
    before["up.weight"].requires_grad_(False)
    assert convert(layer, trainable=True, wgrad="bf16") is layer
    assert type(layer.up) is FP8Linear
    assert type(layer.experts) is GroupedExperts
    after = dict(layer.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert (layer.up.trainable, layer.up.wgrad, layer.experts.wgrad) == (True, "bf16", "bf16")
    layer(torch.randn(9, H).bfloat16()).float().square().mean().backward()
    assert [name for name, x in after.items() if x.grad is None] == ["up.weight"]


@pytest.mark.parametrize("wgrad", ["128x1", "128x128", "bf16"])
def test_an_optimizer_made_before_goes_on(wgrad):
    torch.manual_seed(0)
    layer = Layer()
    plain, x = copy.deepcopy(layer), torch.randn(64, H)
    losses = []
    for model, is_fp8 in ((plain, False), (layer, True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        convert(model, trainable=True, wgrad=wgrad) if is_fp8 else None
        for _ in range(8):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_what_is_tied_stays_tied():
    tied = nn.ModuleDict({"a": nn.Linear(H, H), "b": nn.Linear(H, H)})
    tied["b"].weight = tied["a"].weight
    tied["experts"], tied["twin"] = PlainExperts(2, H, 40), PlainExperts(2, H, 40)
    tied["twin"].down_proj = tied["experts"].down_proj
    tied["embed"], tied["head"] = nn.Embedding(H, H), nn.Linear(H, H, bias=False)
    tied["head"].weight = tied["embed"].weight
    convert(tied, only=["a", "b", "experts", "twin", "head"], trainable=True)
    assert tied["a"].weight is tied["b"].weight
    assert tied["twin"].down_proj is tied["experts"].down_proj
    assert tied["head"].weight is tied["embed"].weight
    assert all(m.trainable for name, m in tied.items() if name != "embed")


def test_overrides_choose_the_form_and_wgrad():
    model = nn.ModuleList([Layer(), Layer(), Layer()])
    convert(
        model,
        trainable=True,
        overrides={
            "0": {"trainable": False},
            "1.experts": {"wgrad": "128x128", "layout": "masked"},
            "1.up": {"wgrad": "bf16"},
        },
    )
    assert [(x.up.trainable, x.experts.trainable) for x in model] == [
        (False, False),
        (True, True),
        (True, True),
    ]
    assert (model[1].experts.wgrad, model[1].experts.layout) == ("128x128", "masked")
    assert (model[1].up.wgrad, model[2].up.wgrad) == ("bf16", "128x1")
    model = convert(nn.ModuleList([Layer(), Layer()]), overrides={"1.up": {"trainable": True}})
    trained = [name for name, m in model.named_modules() if getattr(m, "trainable", False)]
    assert trained == ["1.up"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"wgrad": "fp8"}, ValueError, r"convert: wgrad must be '128x1', .* got 'fp8'"),
        ({"trainable": 1}, TypeError, r"convert: trainable must be True or False, got 1"),
        ({"overrides": {"up": {"wgrad": "fp8"}}}, ValueError, r"wgrad must be '128x1'"),
        ({"overrides": {"up": {"trainable": None}}}, TypeError, r"trainable must be True or False"),
        (
            {"overrides": {"gate": {"trainable": True}}},
            ValueError,
            r"overrides of 'gate' are settings, but no module of that name becomes FP8",
        ),
    ],
)
def test_wrong_settings_are_refused(arguments, error, message):
    layer = Layer()
    with pytest.raises(error, match=message):
        convert(layer, **arguments)
    assert type(layer.up) is nn.Linear


def conv1d() -> nn.Module:
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(H, H)


def strided() -> nn.Module:
    linear = nn.Linear(H, H)
    linear.weight = nn.Parameter(torch.randn(H, H).T)
    return linear


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (conv1d, r"\(Conv1D\) holds its weight as \[in, out\]"),
        (DbrxLike, r"\(DbrxLike\) holds gate and up apart"),
        (strided, r"\(Linear\) must hold .* one column after the other .* got strides \[1, 32\]"),
    ],
)
def test_weights_that_would_need_a_copy_are_refused(make, why):
    model = nn.ModuleDict({"one": make(), "two": make()})
    ways = r"pass skip='one' .*; or overrides=\{'one': \{'trainable': False\}\} to freeze it"
    with pytest.raises(ValueError, match=rf"convert: one {why}.*; {ways}"):
        convert(model, trainable=True)
    with pytest.raises(ValueError, match=why):
        plan_conversion(model, trainable=True)
    convert(model, trainable=True, overrides={"one": {"trainable": False}, "two": False})
    assert not model["one"].trainable


def test_a_meta_model_is_swapped_without_weights():
    with torch.device("meta"):
        model = convert(Layer().bfloat16(), trainable=True)
    assert model.experts.trainable
    assert all(x.is_meta for x in model.parameters())
    assert "experts.down_proj_scale_inv" not in model.state_dict()


def test_the_conversion_tells_the_forms():
    model = nn.ModuleList([Layer(), Layer()])
    plan = plan_conversion(model, trainable=True, overrides={"1.up": {"trainable": False}})
    assert plan.trainable == {"0.up", "0.experts", "1.experts"}
    assert str(plan) == (
        "FP8: 1 linear\nFP8 of master weights: 1 linear, 2 experts\nstays: 2 *.gate (called gate)"
    )


def test_modules_that_are_fp8_already_keep_their_form_and_that_is_said():
    model = convert(Layer())
    with pytest.warns(UserWarning, match=r"2 modules are FP8 already and stay frozen; .*unfreeze"):
        convert(model, trainable=True)
    moefp8.unfreeze(model)
    assert model.up.trainable
    with pytest.warns(UserWarning, match=r"2 modules are FP8 already and stay trainable; .*freeze"):
        convert(model)


@pytest.mark.filterwarnings("error")
def test_the_same_form_again_is_no_warning():
    convert(convert(Layer(), trainable=True), trainable=True)


def test_freeze_gives_what_convert_gives():
    layer = Layer()
    frozen = convert(copy.deepcopy(layer)).state_dict()
    trained = convert(layer, trainable=True)
    assert moefp8.freeze(trained) is trained
    after = trained.state_dict()
    assert after.keys() == frozen.keys()
    for name, x in after.items():
        bits = (x.view(torch.uint8), frozen[name].view(torch.uint8))
        assert torch.equal(*bits), name


def test_the_mode_is_kept():
    layer = Layer().eval()
    layer.up.train()
    convert(layer, trainable=True)
    assert layer.up.training
    assert not layer.experts.training


def test_modules_that_are_trainable_already_keep_their_wgrad_and_it_is_told():
    layer = convert(Layer(), trainable=True)
    with pytest.warns(UserWarning, match=r"2 modules are trainable already .*unfreeze\(model, wg"):
        convert(layer, trainable=True, wgrad="bf16")
    assert layer.up.wgrad == "128x1"
    assert moefp8.unfreeze(layer, wgrad="bf16").up.wgrad == "bf16"


def test_settings_of_what_stays_tell_why_it_does():
    model = nn.Sequential(nn.Linear(H, 48), nn.ReLU(), nn.Linear(48, 20))
    with pytest.raises(ValueError, match=r"overrides of '2' are settings.*2 stays: .*only= names"):
        convert(model, trainable=True, overrides={"2": {"wgrad": "bf16"}})
    convert(model, trainable=True, overrides={"2": {"wgrad": "bf16"}}, only=["0", "2"])
    assert (model[0].wgrad, model[2].wgrad) == ("128x1", "bf16")
