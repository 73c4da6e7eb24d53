"""What `convert` leaves by default and why, what its arguments change, and what it tells."""

import logging
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moefp8 import FP8Linear, GroupedExperts, MoE, convert
from moefp8.layers import plan_conversion
from tests.layers.conversion.plain_experts import PlainExperts

H = 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.output = nn.Linear(H, 3 * H), nn.Linear(H, H)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(H, 80), nn.Linear(80, H)


class Model(nn.Module):
    """Two layers, and heads by the given names."""

    def __init__(self, *heads, outputs=10):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        for head in heads:
            setattr(self, head, nn.Linear(H, outputs))


LAYER = {"attention.qkv", "attention.output", "up", "down"}
IN_LAYERS = {f"layers.{n}.{name}" for n in range(2) for name in LAYER}

HEADS = ["head", "output", "classifier", "score", "embed_out", "lm_head", "anything"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("outputs", [10, H])
def test_heads_stay_by_name_or_because_nothing_takes_what_they_give(head, outputs):
    if head == "anything" and outputs == H:
        pytest.skip("nothing tells that it is a head")
    conversion = plan_conversion(Model(head, outputs=outputs))
    assert conversion.swapped.keys() == IN_LAYERS
    assert conversion.kept.keys() == {head}


@pytest.mark.parametrize("model", [Layer(), Attention(), nn.Sequential(nn.Linear(8, 4))])
def test_the_last_linear_of_a_part_is_no_head(model):
    assert not plan_conversion(model).kept


def test_what_is_tied_to_an_embedding_stays():
    model = Model("decoder", outputs=H)
    model.tokens = nn.Embedding(H, H)
    model.decoder.weight = model.tokens.weight
    assert plan_conversion(model).kept == {"decoder": "tied to an embedding"}
    convert(model)
    assert model.decoder.weight is model.tokens.weight


def test_linears_that_share_a_weight_share_codes():
    model = nn.Sequential(nn.Linear(H, H), nn.ReLU(), nn.Linear(H, H, bias=False))
    model[2].weight = model[0].weight
    wanted = model[2](torch.eye(H))
    convert(model)
    assert isinstance(model[2], FP8Linear)
    assert model[2].weight is model[0].weight
    assert model[2].weight_scale_inv is model[0].weight_scale_inv
    assert torch.allclose(model[2](torch.eye(H)), wanted, atol=0.02)


ROUTERS = ["gate", "gating", "w_gate", "moe_router", "router_gate", "router", "choose"]


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("listed", [True, False])
def test_routers_stay_by_name_or_for_their_width(name, listed):
    block = nn.Module()
    setattr(block, name, nn.Linear(H, 6))
    block.experts = (
        nn.ModuleList(nn.Linear(H, H) for _ in range(6)) if listed else GroupedExperts(6, H, 40)
    )
    block.shared_gate = nn.Linear(H, 1)
    block.after = nn.Linear(H, H)
    kept = plan_conversion(nn.ModuleDict({"block": block})).kept
    assert kept.keys() == {f"block.{name}", "block.shared_gate"}


class Reader(nn.Module):
    """It calls a, multiplies with b's weight, casts to the dtype of c, asks d where it is."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(H, H) for _ in range(4))

    def forward(self, x):
        x = self.a(x).to(self.d.weight.device) @ self.b.weight
        return self.c(x.to(self.c.weight.dtype))


def test_filter_fn_decides_in_place_of_the_defaults():
    seen = []

    def take(module, name):
        seen.append((type(module), name))
        return name in ("head", "layers.0.up")

    assert plan_conversion(Model("head"), filter_fn=take).swapped.keys() == {"head", "layers.0.up"}
    assert (nn.Linear, "layers.1.down") in seen


def of_layer(number: int, *without: str) -> set[str]:
    return {f"layers.{number}.{name}" for name in LAYER - {*without}}


@pytest.mark.parametrize(
    ("arguments", "swapped"),
    [
        ({"only": "layers.0"}, of_layer(0)),
        ({"only": ["layers.0.*"]}, of_layer(0)),
        ({"only": ("layers.0.attention", "layers.0.up", "*.0.down")}, of_layer(0)),
        ({"only": "*"}, IN_LAYERS),  # but for what stays
        ({"only": "head"}, {"head"}),  # a full name, whatever the defaults say
        ({"only": "layers.1", "skip": "up"}, of_layer(1, "up")),
        ({"skip": None}, IN_LAYERS),
        (
            {"skip": "up", "overrides": {"layers.0": False, "head": True, "*.down": True}},
            {"head", *of_layer(1, "up")},
        ),
    ],
)
def test_arguments_choose(arguments, swapped):
    conversion = plan_conversion(Model("head"), **arguments)
    assert conversion.swapped.keys() == swapped
    assert conversion.kept.keys() == {"head", *IN_LAYERS} - swapped
    if arguments.get("only") == "layers.0":
        assert {*conversion.kept.values()} == {"not in only"}


def test_a_full_name_in_only_is_that_one_alone():
    model = nn.ModuleDict({"lm_head": nn.Linear(H, H), "mtp": Model("lm_head")})
    assert plan_conversion(model, only="lm_head").swapped.keys() == {"lm_head"}


def test_overrides_set_up_experts():
    model = nn.ModuleList([PlainExperts(), PlainExperts()])
    convert(model, overrides={"1": {"layout": "masked"}})
    assert [experts.layout for experts in model] == ["auto", "masked"]
    known = r"\['activation', 'layout', 'swiglu_limit', 'trainable', 'wgrad'\]"
    with pytest.raises(ValueError, match=rf"of {known}, got \['tile'\]"):
        convert(nn.ModuleList([PlainExperts()]), overrides={"0": {"tile": 3}})


@pytest.mark.parametrize("argument", ["skip", "only", "overrides"])
def test_patterns_that_are_nowhere_are_errors(argument):
    model, patterns = Model(), {"up": True, "layer.0": False}
    with pytest.raises(ValueError, match=f"every name in {argument} must be in .*got 'layer.0'"):
        convert(model, **{argument: patterns if argument == "overrides" else [*patterns]})
    assert type(model.layers[0].up) is nn.Linear


def test_it_is_logged_and_returned(caplog):
    model = Model("lm_head")
    with caplog.at_level(logging.INFO, logger="moefp8"):
        converted, conversion = convert(model, skip="up", return_conversion=True)
    assert converted is model
    assert str(conversion) == (
        "FP8: 6 linears\nstays: 2 layers.*.up (skipped)\nstays: 1 lm_head (called lm_head)"
    )
    assert str(conversion) in caplog.text


class OwnLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(OwnLinear(8, 8)), r"1 \* \(a subclass of nn.Linear \(OwnLinear\)\)"),
        (nn.Sequential(nn.Conv2d(3, 3, 1)), "there are neither linears nor experts"),
        (nn.ModuleDict({"lm_head": nn.Linear(8, 8)}), r"1 lm_head \(called lm_head\)"),
    ],
)
def test_nothing_swapped_is_a_warning(model, why):
    with pytest.warns(UserWarning, match=f"convert: nothing becomes FP8: {why}"):
        convert(model)


@pytest.mark.filterwarnings("error")
def test_a_model_that_is_fp8_already_is_no_warning():
    convert(convert(Model("lm_head")))
    convert(MoE(H, 40, num_experts=4, top_k=2))


def test_conv1d_of_transformers_is_swapped():
    utils = pytest.importorskip("transformers.pytorch_utils")
    conv, x = utils.Conv1D(48, H), torch.randn(5, 3, H)
    nn.init.normal_(conv.bias)
    wanted = conv(x).detach()
    ours = convert(conv)
    assert (ours.in_features, ours.out_features) == (H, 48)
    assert (ours(x) - wanted).norm() / wanted.norm() < 0.06


class Around(nn.Module):
    """Experts one by one in a list of any name, and what chooses among them beside or around it."""

    def __init__(self, num_outputs=4, is_around=False, name="ffns"):
        super().__init__()
        experts = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.Linear(H, H)) for _ in range(4))
        self.moe = nn.ModuleDict({name: experts})
        (self if is_around else self.moe).add_module("selector", nn.Linear(H, num_outputs))
        self.after = nn.Linear(H, H)


@pytest.mark.parametrize(
    "layer",
    [Around(), Around(5), Around(is_around=True, name="experts"), Around(name="moe_layers")],
)
def test_routers_of_lists_of_any_name(layer):
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    kept = plan_conversion(model).kept
    assert [name.rpartition(".")[2] for name in kept] == ["selector"]
    assert re.search(r"a router: [45] outputs for 4 experts", "".join(kept.values()))


class Readers(nn.Module):
    """Methods that read the weights of modules, by way of other names."""

    def __init__(self):
        super().__init__()
        self.alias, self.called, self.shape = (nn.Linear(H, H) for _ in range(3))
        self.pair, self.other = nn.Linear(H, H), nn.Linear(H, H)
        self.several = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
        self.one = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
        self.experts = PlainExperts(2, H, 40)
        self.free = PlainExperts(2, H, 40)

    def forward(this, x):
        linear = this.alias
        x = F.linear(x, linear.weight.to(x.dtype)) + this.called(x)[:, : this.shape.weight.shape[0]]
        for each in this.several:
            x = F.linear(x, each.weight)
        x = x @ torch.cat([y.weight for y in (this.pair, this.other)])
        return F.linear(x, this.one[0].weight) @ this.experts.gate_up_proj[0]


class Language(Model):
    def get_output_embeddings(self):
        return self.unembed


class Careful(Model):
    _keep_in_fp32_modules = ("down",)
    _keep_in_fp32_modules_strict = ("0.attention.output", "1.up.weight", "qkv.bias")


class Small(nn.Module):
    """A head that is defined first, and no layers."""

    def __init__(self):
        super().__init__()
        self.head, self.first, self.second = nn.Linear(H, 10), nn.Linear(H, H), nn.Linear(H, H)


def attention_of_torch() -> nn.MultiheadAttention:
    attention = nn.MultiheadAttention(H, 2)
    attention.out_proj = nn.Linear(H, H)
    return attention


def wide_attention() -> nn.ModuleDict:
    """Attention with a projection as wide as there are experts."""
    attention = nn.ModuleDict({"k": nn.Linear(H, 6)})
    experts = GroupedExperts(6, H, 40)
    return nn.ModuleDict({"self_attn": attention, "experts": experts, "after": nn.Linear(H, H)})


# model, what stays of it and why
KEPT = {
    "two heads": (
        Model("boxes", "classes", outputs=7),
        dict.fromkeys(("boxes", "classes"), "a head: nothing takes what it gives"),
    ),
    "a head that is asked for": (
        nn.ModuleList([Language("unembed", outputs=H), nn.Linear(H, H)]),
        {"0.unembed": "the output embedding"},
    ),
    "a head without layers": (Small(), {"head": "called head"}),
    "what is kept in FP32": (
        Careful(),
        {
            **dict.fromkeys(("layers.0.down", "layers.1.down"), "Careful keeps down in FP32"),
            "layers.0.attention.output": "Careful keeps 0.attention.output in FP32",
            "layers.1.up": "Careful keeps 1.up.weight in FP32",
        },
    ),
    "weights that are read": (Reader(), dict.fromkeys("bc", "Reader reads its weight")),
    "weights that attention of torch reads": (
        nn.ModuleList([attention_of_torch(), nn.Linear(H, H)]),
        {"0.out_proj": "its weight is read by nn.MultiheadAttention"},
    ),
    "no router in attention": (wide_attention(), {}),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_stays_and_why(case):
    model, kept = KEPT[case]
    assert plan_conversion(model).kept == kept


def test_weights_that_are_read_by_other_names():
    conversion = plan_conversion(nn.ModuleDict({"layers": nn.ModuleList([Readers()])}))
    swapped = {name.removeprefix("layers.0.") for name in conversion.swapped}
    assert swapped == {"called", "shape", "free"}
    assert set(conversion.kept.values()) == {"Readers reads its weight"}


@pytest.mark.parametrize("make", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_is_no_parameter_stays(make):
    model = nn.Sequential(make(nn.Linear(H, H)), nn.Linear(H, H), nn.LazyLinear(H))
    kept = plan_conversion(model).kept
    assert kept["0"] == "its weight is no parameter, or not there yet"
    assert kept["2"] == "a subclass of nn.Linear (LazyLinear)"


def test_settings_are_of_experts_alone():
    layer = nn.ModuleDict({"gate": nn.Linear(H, 4), "up": nn.Linear(H, H)})
    layer["experts"] = PlainExperts(4, H, 40)
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    overrides = {"layers.0": {"layout": "masked"}}
    assert plan_conversion(model, overrides=overrides).kept.keys() == {"layers.0.gate"}
    with pytest.raises(ValueError, match=r"'\*\.up' are settings of experts, but no experts of"):
        plan_conversion(model, overrides={"*.up": {"layout": "masked"}})
    with pytest.raises(ValueError, match="layout must be 'auto'"):
        plan_conversion(model, overrides={"layers.0": {"layout": "any"}})
    with pytest.raises(ValueError, match="every name in overrides must be in the model"):
        plan_conversion(model, overrides={"lm_head": True})


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        ({"skip": nn.Linear}, "skip must be a name, or names"),
        ({"skip": ""}, "skip must be a name, or names"),
        ({"only": [3]}, "only must be a name, or names"),
        ({"overrides": {"layers": 1}}, "overrides must be names .* got 'layers': 1"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments, needle):
    with pytest.raises(TypeError, match=needle):
        convert(Model(), **arguments)


@pytest.mark.parametrize("model", [None, {}, nn.Linear, torch.jit.script(nn.Linear(8, 8))])
def test_what_is_no_plain_module_is_refused(model):
    with pytest.raises(TypeError, match=r"model must be an nn\.Module that is not scripted"):
        convert(model)


def test_weights_that_are_not_finite_are_told():
    model = Model()
    with torch.no_grad():
        model.layers[1].up.weight[3, 3] = torch.nan
    with pytest.warns(UserWarning, match=r"weights of layers\.1\.up hold NaN or Inf"):
        convert(model)


def test_experts_that_share_weights_share_codes():
    first, second = PlainExperts(4, H, 40), PlainExperts(4, H, 40)
    second.down_proj, second.gate_up_proj = first.down_proj, first.gate_up_proj
    model = convert(nn.ModuleList([first, second]))
    assert model[0].down_proj is model[1].down_proj


def test_the_model_itself_has_no_name():
    assert isinstance(convert(nn.Linear(H, H), only=[""]), FP8Linear)
