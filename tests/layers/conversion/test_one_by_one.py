"""`convert` and experts in a list that are not stacked: why, and the recipe to run them at once."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moefp8
from moefp8 import FP8Linear, GroupedExperts, convert
from moefp8.layers import plan_conversion
from moefp8.testing import relative_error
from tests.layers.conversion.hand_written import (
    FeedForward,
    Fused,
    H,
    I,
    InDict,
    Masked,
    Model,
    Scaled,
    Sparse,
    WithLogits,
    convert_with_warning,
    of_experts,
    with_forward,
)


class Gelu(FeedForward):
    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)) * self.w3(x))


class Dropping(FeedForward):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Biased(FeedForward):
    def __init__(self):
        super().__init__(bias=True)


class UpFirst(Fused):
    is_gate_first = False


class OneIsOther(Sparse):
    def __init__(self):
        super().__init__(Scaled)
        for expert in self.experts:
            expert.scale = 1.0
        self.experts[2].scale = 1.1


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
    "up first": (of_experts(UpFirst), "gate rows first, and compute something else", False),
}


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
    assert type(block.experts[3].w2) is FP8Linear


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


class ScalingFused(Scaling):
    def __init__(self):
        super().__init__(Fused)


class ScalingInDict(InDict):
    def loop(self, x, weights, ids):
        return 1.1 * super().loop(x, weights, ids)


class ScalingMasked(Masked):
    def forward(self, x):
        return 1.1 * super().forward(x)


def lines_of(warning):
    first, second = re.findall(r"^    (\S.*)$", warning, re.MULTILINE)
    return first, second


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("kind", [Scaling, ScalingFused, ScalingInDict, ScalingMasked])
def test_the_two_lines_of_the_recipe_run_experts_at_once(kind, trainable):
    block, x = kind(), torch.randn(30, H)
    model = nn.ModuleDict({"moe": copy.deepcopy(block)})
    warning = convert_with_warning(model, trainable=trainable)
    assert "such as a capacity, dropout or a scale, is then gone" in warning
    first, second = lines_of(warning)
    names = {"moefp8": moefp8, "torch": torch, "self": block, "x": x}
    experts = [*(block.ffns if kind is ScalingMasked else block.experts).children()]
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


# ---- Lists of other forms ----


class OfSequentials(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, 4)
        layers = lambda: (nn.Linear(H, I), nn.GELU(), nn.Linear(I, H), nn.Dropout(0.1))  # noqa: E731
        self.experts = nn.ModuleList(nn.Sequential(*layers()) for _ in range(4))


class InThreeLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, 4)
        self.w1, self.w3 = (
            nn.ModuleList(nn.Linear(H, I, bias=False) for _ in range(4)) for _ in range(2)
        )
        self.w2 = nn.ModuleList(nn.Linear(I, H, bias=False) for _ in range(4))


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        (OfSequentials, "experts", "each expert must hold three linears"),
        (InThreeLists, "w1", "each expert's linears are in several lists, w1, w3, w2"),
    ],
)
def test_lists_of_other_forms_are_told(kind, name, why):
    model = Model(kind)
    plan = plan_conversion(model)
    places = [f"layers.{n}.moe.{name}" for n in range(2)]
    assert [*plan.one_by_one] == places
    warning = convert_with_warning(model)
    assert f"one by one: 2 layers.*.moe.{name} ({kind.__name__}): {why}" in warning
    assert "GroupedExperts.from_weights" in warning
    assert type(model.get_submodule(places[0])[0]) in (FP8Linear, nn.Sequential)
    assert not plan_conversion(Model(kind), skip="layers.*.moe").one_by_one


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
