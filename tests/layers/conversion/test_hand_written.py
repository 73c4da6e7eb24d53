"""`convert` and experts in a list: stacked where a trial shows the same outputs, else a recipe."""

import copy
import pickle
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import moefp8
from moefp8 import FP8Linear, GroupedExperts, convert
from moefp8.layers import PlainExperts, plan_conversion
from moefp8.testing import relative_error
from tests.layers.conversion.hand_written import (
    EveryExpert,
    FeedForward,
    H,
    I,
    Masked,
    Model,
    PlainTokens,
    Sigmoid,
    Sparse,
    WithLogits,
)


class KnowsItsConfig(Sparse):
    """It takes its width from a config, so that it runs at no other."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=H)

    def forward(self, x):
        weights, ids = self.choose(self.gate(x.view(-1, self.config.hidden_size)))
        y = self.loop(x.view(-1, self.config.hidden_size), weights.to(x.dtype), ids)
        return y.view(x.shape)


class Guarded(Sparse):
    def forward(self, x):
        if x.shape[1] > 3000:
            raise ValueError("at most 3000 tokens")
        return super().forward(x)


class ManyExperts(Sparse):
    def __init__(self):
        super().__init__(num_experts=40, top_k=6)


STACKED = [
    ManyExperts,
    Sparse,
    WithLogits,
    Masked,
    PlainTokens,
    Sigmoid,
    EveryExpert,
    KnowsItsConfig,
    Guarded,
]


def output(y):
    return (y[0] if isinstance(y, tuple) else y).detach()


def tokens(kind, dtype=torch.float32):
    x = torch.randn(3, 10, H, dtype=dtype)
    return x[0] if kind is PlainTokens else x


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", STACKED)
def test_experts_in_a_list_become_one_module(kind, dtype):
    torch.manual_seed(0)
    model, x = Model(kind).to(dtype), tokens(kind, dtype)
    block = model.layers[1]["moe"]
    before = block(x)
    _, conversion = convert(model, return_conversion=True)
    after = model.layers[1]["moe"](x)
    assert str(conversion).startswith("FP8: 2 linears, 2 experts\nstays: 2 layers.*.moe.")
    name = "ffns" if kind is Masked else "experts"
    assert conversion.swapped[f"layers.1.moe.{name}"] == "experts"
    assert isinstance(getattr(model.layers[1]["moe"], name), GroupedExperts)
    assert output(after).dtype == dtype
    assert relative_error(output(after), output(before)) < 0.13
    if kind is WithLogits:
        assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("kind", [Sparse, PlainTokens, Sigmoid])
def test_they_give_what_the_blocks_choice_gives(kind, top_k):
    block, x = kind(top_k=top_k), torch.randn(50, H)
    experts = block.experts
    if kind is PlainTokens:
        weights, ids = block.gate(x).softmax(dim=-1).topk(top_k)
    else:
        weights, ids = block.choose(block.gate(x))
    stacks = (
        torch.stack([torch.cat([e.w1.weight, e.w3.weight]) for e in experts]),
        torch.stack([e.w2.weight for e in experts]),
    )
    wanted = GroupedExperts.from_weights(*stacks)(x, ids, weights)
    assert relative_error(convert(block)(x), wanted) < 5e-3


def test_the_router_is_the_same_module_and_names_stay():
    model = Model(Masked)
    router, keys = model.layers[0]["moe"].router, set(model.state_dict())
    optimized = [*router.parameters()]
    convert(model)
    block = model.layers[0]["moe"]
    assert block.router is router
    assert all(a is b for a, b in zip(block.router.parameters(), optimized, strict=True))
    left = {key for key in keys if ".moe." in key and ".ffns." not in key}
    assert left < set(model.state_dict())
    x = torch.randn(2, 5, H, requires_grad=True)
    model(x).square().mean().backward()
    assert x.grad.norm() > 0
    assert router.weight.grad.norm() > 0


# ---- What is not stacked ----


class Gelu(FeedForward):
    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)) * self.w3(x))


class Scaled(FeedForward):
    scale = 1.1

    def forward(self, x):
        return super().forward(x) * self.scale


class Dropping(FeedForward):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Biased(FeedForward):
    def __init__(self):
        super().__init__(bias=True)


class OneIsOther(Sparse):
    def __init__(self):
        super().__init__(Scaled)
        for expert in self.experts:
            expert.scale = 1.0
        self.experts[2].scale = 1.1


def with_forward(forward, base=Sparse, **attributes):
    run = base.forward
    return type("Own", (base,), {"forward": lambda self, x: forward(self, x, run), **attributes})


def keeping_loss(self, x, run):
    self.aux_loss = self.gate.weight.square().mean()
    return run(self, x)


class Capacity(Sparse):
    capacity = 100

    def loop(self, x, weights, ids):
        ranks = F.one_hot(ids, self.num_experts).sum(1).cumsum(0).gather(1, ids)
        return super().loop(x, weights * (ranks <= self.capacity), ids)


class Noisy(Sparse):
    def choose(self, logits):
        noise = torch.randn_like(logits) if self.training else 0.0
        return super().choose(logits + noise)


class Jitter(Sparse):
    def forward(self, x):
        return super().forward(x * (1 + 0.01 * torch.randn_like(x)) if self.training else x)


class ReadsWeight(Sparse):
    def forward(self, x):
        weights, ids = self.choose(F.linear(x.flatten(0, 1).double(), self.gate.weight.double()))
        return self.loop(x.flatten(0, 1), weights.to(x.dtype), ids).view(x.shape)


class Shared(Sparse):
    def __init__(self):
        super().__init__()
        self.shared = FeedForward()

    def forward(self, x):
        return super().forward(x) + self.shared(x)


class ByKeyword(Sparse):
    def forward(self, x):
        weights, ids = self.choose(self.gate(input=x.flatten(0, 1)))
        return self.loop(x.flatten(0, 1), weights.to(x.dtype), ids).view(x.shape)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(H, 4)

    def forward(self, x):
        return self.proj(x)


class OwnRouter(Sparse):
    def __init__(self):
        super().__init__()
        self.gate = Router()


def of_experts(kind):
    return type("Own", (Sparse,), {"__init__": lambda self: Sparse.__init__(self, kind)})


# name -> (block, why its experts stay one by one, whether GroupedExperts computes the same)
ONE_BY_ONE = {
    "scaled": (with_forward(lambda self, x, run: 1.1 * run(self, x)), "up to 10 % off", True),
    "added to its input": (with_forward(lambda self, x, run: x + run(self, x)), "% off", True),
    "changes its input": (
        with_forward(lambda self, x, run: run(self, x) + 0 * x.mul_(2)),
        "leave its input",
        True,
    ),
    "another in 16 bits": (
        with_forward(lambda self, x, run: run(self, x) * (1 if x.dtype == torch.float32 else 1.1)),
        "% off",
        True,
    ),
    "one token": (
        with_forward(lambda self, x, run: run(self, x) * (2 if x.shape[1] == 1 else 1)),
        "on 1 random tokens",
        True,
    ),
    "capacity": (Capacity, "on 101 random tokens", True),
    "loss beside": (
        with_forward(lambda self, x, run: (run(self, x), x.square().mean())),
        "logits .* got a tuple",
        True,
    ),
    "loss kept": (with_forward(keeping_loss), "changes aux_loss", True),
    "noise": (Noisy, r"% off in training mode \(call model.eval\(\)", True),
    "jitter": (Jitter, "call gate with its input, got something else in training mode", True),
    "by keyword": (ByKeyword, "call gate with its input, got something else", True),
    "one result or two": (
        with_forward(lambda self, x, run: run(self, x)[: 1 + (x.shape[1] > 1)], WithLogits),
        "one tensor each time, or two",
        True,
    ),
    "reads the router": (ReadsWeight, "call gate once, for all tokens, got 0 calls", True),
    "shared experts": (Shared, "shared.w1.weight besides", True),
    "router of its own": (OwnRouter, "no linear of its own from 64 to 4", True),
    "dropout": (of_experts(Dropping), "% off in training mode", True),
    "gelu": (of_experts(Gelu), "its experts must compute down", False),
    "scaled experts": (of_experts(Scaled), "its experts must compute down", False),
    "one is other": (OneIsOther, "its experts must compute down", False),
    "biases": (of_experts(Biased), "have biases", False),
}


def convert_with_warning(model, **arguments):
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        convert(model, **arguments)
    (warning,) = (str(x.message) for x in raised)
    return warning


@pytest.mark.parametrize("case", ONE_BY_ONE)
def test_other_blocks_keep_their_forward_and_a_warning_tells_why(case):
    kind, why, has_recipe = ONE_BY_ONE[case]
    model = Model(kind).bfloat16()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    conversion = plan_conversion(model)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert all(vars(m).keys() == attributes[n].keys() for n, m in model.named_modules())
    assert all(m.training for m in model.modules())
    warning = convert_with_warning(model)
    assert warning == f"convert: {conversion.warning()}"
    start = rf"^convert: experts run one by one: 2 layers\.\*\.moe\.experts \({kind.__name__}\): it"
    assert re.search(start, warning)
    assert re.search(why, warning.splitlines()[0])
    assert ("To run them at once" in warning) == has_recipe
    assert "one by one: 2 layers.*.moe.experts" in str(conversion)
    block = model.layers[0]["moe"]
    assert type(block) is kind
    assert type(block.experts[3].w3) is FP8Linear


@pytest.mark.parametrize("kind", [Dropping, FeedForward])
def test_a_block_that_serves_is_tried_as_it_serves(kind):
    noisy = type("Own", (Noisy,), {"__init__": lambda self: Noisy.__init__(self, kind)})
    model = Model(noisy).eval()
    convert(model)
    assert isinstance(model.layers[0]["moe"].experts, GroupedExperts)
    assert not any(module.training for module in model.modules())


# ---- The recipe ----


class Scaling(Sparse):
    """It scales what it gives: not our formula, but the loop can be replaced."""

    def loop(self, x, weights, ids):
        return 1.1 * super().loop(x, weights, ids)


class ScalingMasked(Masked):
    def forward(self, x):
        return 1.1 * super().forward(x)


def lines_of(warning):
    first, second = re.findall(r"^    (\S.*)$", warning, re.MULTILINE)
    return first, second


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("kind", [Scaling, ScalingMasked])
def test_the_two_lines_of_the_recipe_run_experts_at_once(kind, trainable):
    block, x = kind(), torch.randn(30, H)
    model = nn.ModuleDict({"moe": copy.deepcopy(block)})
    first, second = lines_of(convert_with_warning(model, trainable=trainable))
    names = {"moefp8": moefp8, "torch": torch, "self": block, "x": x}
    experts = block.ffns if kind is ScalingMasked else block.experts
    index, weights = torch.randint(4, (30, 2)), torch.rand(30, 2)
    wanted = torch.zeros_like(x)
    for choice in range(2):
        for token, i in enumerate(index[:, choice].tolist()):
            wanted[token] += weights[token, choice] * experts[i](x[token]).detach()
    names |= {"top_k_index": index, "top_k_weights": weights}
    exec(f"{first}\n{second}", names)
    assert relative_error(names["y"].detach(), wanted) < 0.13
    stacked = block.ffns if kind is ScalingMasked else block.experts
    assert isinstance(stacked, GroupedExperts)
    assert stacked.trainable == trainable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(nn.ModuleDict({"proj": nn.Linear(H, H), "moe": block}), trainable=trainable)


def test_master_weights_stay_those_that_an_optimizer_knows():
    model = Model()
    weight = model.layers[0]["moe"].experts[0].w1.weight
    warning = convert_with_warning(model, trainable=True)
    assert "a parameter that no optimizer knows" in warning
    assert "trainable=True)\n" in warning
    assert model.layers[0]["moe"].experts[0].w1.weight is weight


def test_a_model_that_saves_itself_keeps_its_names():
    model = Model()
    model.save_pretrained = lambda path: None
    assert "save_pretrained has to write them" in plan_conversion(model).warning()


def test_a_block_that_is_compiled_stays_in_its_wrapper():
    model = nn.ModuleDict({"moe": torch.compile(Sparse(), backend="eager")})
    assert "convert before compiling" in plan_conversion(model).warning()


# ---- Arguments ----


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ({"skip": "experts"}, (nn.Linear, nn.Linear)),
        ({"skip": "w2"}, (FP8Linear, nn.Linear)),
        ({"skip": "*.experts.3"}, (FP8Linear, FP8Linear)),
        ({"only": "layers.*.proj"}, (nn.Linear, nn.Linear)),
        ({"only": "layers.0.moe.experts.0.w1"}, (FP8Linear, nn.Linear)),
        ({"overrides": {"*.w2": False}}, (FP8Linear, nn.Linear)),
        ({"filter_fn": lambda module, name: name.endswith("w1")}, (FP8Linear, nn.Linear)),
    ],
)
def test_a_list_of_which_some_stay_is_not_stacked(arguments, kinds):
    model = convert(Model(), **arguments)
    expert = model.layers[0]["moe"].experts[0]
    assert (type(expert.w1), type(expert.w2)) == kinds


@pytest.mark.parametrize(
    "arguments",
    [
        {"only": "experts"},
        {"only": "layers.0.moe"},
        {"filter_fn": lambda module, name: "experts" in name},
        {"skip": "layers.1", "overrides": {"layers.0.moe.experts": True}},
        {"overrides": {"layers.0": {"layout": "masked"}, "layers.1": False}},
    ],
)
def test_arguments_that_take_all_of_a_list_stack_it(arguments):
    model = convert(Model(), **arguments)
    experts = model.layers[0]["moe"].experts
    assert isinstance(experts, GroupedExperts)
    assert experts.layout == ("masked" if "layers.1" in arguments.get("overrides", {}) else "auto")
    assert type(model.layers[0]["moe"].gate) is nn.Linear


def test_a_router_that_is_to_be_fp8_is_no_router_of_a_stack():
    warning = convert_with_warning(Model(), overrides={"*.gate": True})
    assert "gate, which routes to them, becomes FP8" in warning


# ---- A model with stacked experts ----


def test_the_model_itself_and_shared_blocks():
    block, x = Sparse(), torch.randn(2, 5, H)
    model = nn.ModuleList([block, block])
    wanted = block(x).detach()
    convert(model)
    assert model[0] is model[1]
    ours = convert(block)
    assert ours is not block
    assert relative_error(ours(x), wanted) < 0.13


def test_it_is_copied_pickled_compiled_and_brought_back():
    model, x = convert(Model(WithLogits)), torch.randn(2, 5, H)
    wanted = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), wanted)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model)
    moefp8.dequantize(model)
    assert isinstance(model.layers[0]["moe"].experts, PlainExperts)
    convert(model.float())
    assert isinstance(model.layers[0]["moe"].experts, GroupedExperts)
    assert relative_error(model(x), wanted) < 0.02


def test_a_checkpoint_of_single_experts_fills_a_model_that_was_swapped_on_meta(tmp_path):
    model, x = convert(Model().bfloat16()), torch.randn(2, 5, H).bfloat16()
    moefp8.save_checkpoint(model, tmp_path / "fp8")
    keys = load_file(tmp_path / "fp8" / "model.safetensors").keys()
    assert "layers.1.moe.experts.3.gate_proj.weight_scale_inv" in keys
    with torch.device("meta"):
        empty = convert(Model().bfloat16())
    moefp8.load_checkpoint(empty, tmp_path / "fp8")
    assert torch.equal(empty(x), model(x))


def test_blocks_of_one_make_share_a_trial():
    calls = []

    def counting(self, x, run):
        calls.append(len(x))
        return run(self, x)

    kind = with_forward(counting)
    plan_conversion(Model(kind, num_layers=1))
    num_calls = len(calls)
    plan_conversion(Model(kind, num_layers=3))
    assert len(calls) == 2 * num_calls > 0


def test_a_layer_that_differs_is_tried_by_itself():
    model = Model(of_experts(Scaled), num_layers=3)
    for layer in model.layers[:2]:
        for expert in layer["moe"].experts:
            expert.scale = 1.0
    conversion = plan_conversion(model)
    assert {name for name, kind in conversion.swapped.items() if kind == "experts"} == {
        "layers.0.moe.experts",
        "layers.1.moe.experts",
    }
    assert conversion.one_by_one.keys() == {"layers.2.moe.experts"}


def test_lists_of_layers_are_no_experts():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(FeedForward() for _ in range(3))
            self.head = nn.Linear(H, I)

    conversion = plan_conversion(Deep())
    assert not conversion.one_by_one
    assert {*conversion.swapped.values()} == {"linear"}
