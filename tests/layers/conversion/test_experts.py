"""`convert` and experts of others: run before they are swapped, refused if not as ours."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import moefp8.layers.conversion.plain
from moefp8 import GroupedExperts, convert
from moefp8.kernels.common.activation import Activation
from moefp8.layers import plan_conversion
from moefp8.testing import relative_error
from tests.layers.conversion.foreign_experts import (
    DTYPES,
    OFF,
    E,
    H,
    I,
    Model,
    assert_refused,
    with_activation,
    with_forward,
)
from tests.layers.conversion.plain_experts import DbrxLike, VllmLike
from tests.layers.conversion.plain_experts import PlainExperts as Experts
from tests.layers.memory import peak

# Instead of silu(gate) * up
ACTIVATIONS = {
    "up first": (lambda gate, up: F.silu(up) * gate, "its up rows come before its gate rows"),
    "plus one": (lambda gate, up: F.silu(gate) * (up + 1), OFF),
    "limited": (lambda gate, up: F.silu(gate.clamp(max=7)) * up.clamp(-7, 7), OFF),  # unsaid
}

# run: the right forward
FORWARDS = {
    "scaled": (lambda run, *inputs: 1.5 * run(*inputs), r"up to 5\d % off"),
    "4 percent": (lambda run, *inputs: 1.04 * run(*inputs), r"up to [45] % off"),
    "many tokens": (
        lambda run, x, *choice: run(x, *choice) * (2 if len(x) > 30 else 1),
        r"on 31 random tokens",
    ),
    "one token": (
        lambda run, x, *choice: run(x, *choice) * (2 if len(x) == 1 else 1),
        "on 1 random tokens",
    ),
    "pairs of tokens": (
        lambda run, x, *choice: run(x, *choice) * (2 if len(x) % 48 == 0 else 1),
        "on 48 random tokens",
    ),
    "four choices": (
        lambda run, x, ids, scores: run(x, ids, scores * (2 if ids.shape[1] == 4 else 1)),
        "on 1 random tokens of 4 choices",
    ),
    "by choices": (lambda run, x, ids, scores: run(x, ids, scores * 2 / ids.shape[1]), OFF),
    "clamped scores": (lambda run, x, ids, scores: run(x, ids, scores.clamp(min=0.1)), OFF),
    "positive": (lambda run, x, ids, scores: run(x, ids, scores.abs()), OFF),
    "unweighted": (lambda run, x, ids, scores: run(x, ids, torch.ones_like(scores)), OFF),
    "other expert": (lambda run, x, ids, scores: run(x, (ids + 1) % E, scores), OFF),
    "one argument": (lambda run, x: x, r"must have forward.* raised TypeError"),
    "two results": (lambda run, *inputs: (run(*inputs), 1), "must give one tensor .*, got tuple"),
}


class ScaledByBuffer(Experts):
    is_saved = True

    def __init__(self):
        super().__init__()
        factor = torch.tensor([1.0, 1.0, 1.1, 1.0])
        self.register_buffer("factor", factor, persistent=self.is_saved)

    def expert(self, x, expert):
        return self.factor[expert] * super().expert(x, expert)


class ScaledByHiddenBuffer(ScaledByBuffer):
    is_saved = False


class LastIsOther(Experts):
    def __init__(self):
        super().__init__(num_experts=16)

    def expert(self, x, expert):
        return super().expert(x, expert) * (3 if expert == 15 else 1)


class Identity(Experts):
    """The id E is an expert that gives back what it gets."""

    def expert(self, x, expert):
        return x if expert == E else super().expert(x, expert)


class OtherCall(Experts):
    def __call__(self, *inputs):
        return 3 * super().__call__(*inputs)


# name -> (class, why it is refused)
FOREIGN = {
    **{name: (with_activation(f), rule) for name, (f, rule) in ACTIVATIONS.items()},
    **{name: (with_forward(f), rule) for name, (f, rule) in FORWARDS.items()},
    "buffer": (ScaledByBuffer, r"no buffers that are saved, got \['factor'\]"),
    "hidden buffer": (ScaledByHiddenBuffer, OFF),
    "last is other": (LastIsOther, OFF),
    "identity": (Identity, "must count the id E with weight 0"),
    "other call": (OtherCall, "must have no hooks and no forward of its own"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FOREIGN)
def test_experts_that_compute_otherwise_are_refused_with_the_way_out(case, dtype):
    assert_refused(*FOREIGN[case], dtype)


@pytest.mark.parametrize("case", ["up first", "plus one", "scaled", "limited"])
def test_so_are_they_on_the_meta_device(case):
    kind, rule = FOREIGN[case]
    with torch.device("meta"):
        model = Model(kind)
    with pytest.raises(ValueError, match=rule):
        convert(model)


def large(kind: type[Experts], fill, num_experts=64, hidden_size=256, width=32) -> Experts:
    experts = kind(num_experts=0)
    gate_up, down = (num_experts, 2 * width, hidden_size), (num_experts, hidden_size, width)
    experts.gate_up_proj = nn.Parameter(fill(*gate_up).bfloat16())
    experts.down_proj = nn.Parameter(fill(*down).bfloat16())
    return experts


def same_for_all(num_experts, *shape):
    return 0.1 * torch.randn(shape).expand(num_experts, *shape)


class OneScaled(Experts):
    def expert(self, x, expert):
        return super().expert(x, expert) * (3 if expert == 37 else 1)


class OtherExpert(Experts):
    def forward(self, x, ids, scores):
        return super().forward(x, (ids + 1) % len(self.down_proj), scores)


@pytest.mark.parametrize("kind", [OneScaled, OtherExpert])
@pytest.mark.parametrize(
    "fill",
    [
        lambda *shape: 0.1 * torch.randn(shape),
        torch.randn,
        torch.zeros,
        lambda *shape: torch.full(shape, torch.nan),
        same_for_all,
        partial(torch.empty, device="meta"),
    ],
    ids=["random", "large", "zeros", "nan", "equal", "meta"],
)
def test_of_large_stacks_each_expert_is_run(kind, fill):
    with pytest.raises(ValueError, match=OFF):
        plan_conversion(large(kind, fill))
    assert plan_conversion(large(Experts, fill)).swapped, "they may be filled later"


@pytest.mark.parametrize("kind", [OneScaled, OtherExpert])
def test_of_very_large_stacks_too(kind):
    fill = partial(torch.empty, device="meta")
    with pytest.raises(ValueError, match=OFF):
        plan_conversion(large(kind, fill, hidden_size=512, width=640))


def test_a_forward_that_differs_in_training_is_refused_if_weights_train():
    class Dropping(Experts):
        def forward(self, x, *choice):
            return super().forward(F.dropout(x, 0.1, self.training), *choice)

    assert plan_conversion(Dropping()).swapped
    with pytest.raises(ValueError, match=OFF):
        plan_conversion(Dropping(), trainable=True)


@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize(
    ("act_fn", "kind"), [(nn.GELU(), "geglu"), (nn.GELU(approximate="tanh"), "geglu_tanh")]
)
def test_experts_with_a_gelu_convert(act_fn, kind, limit):
    experts = Experts(limit=limit)
    experts.act_fn = act_fn
    x, *choice = torch.randn(9, 64), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    expected = experts(x, *choice)
    converted = convert(experts)
    assert converted.activation == Activation(kind, limit)
    assert relative_error(converted(x, *choice), expected) < 0.1
    wrong = GroupedExperts.from_weights(*converted.dequantize(), swiglu_limit=limit)
    assert relative_error(wrong(x, *choice), expected) > 0.12


@pytest.mark.parametrize("limit", [0.5, 7.0, 30.0])
@pytest.mark.parametrize("name", ["limit", "swiglu_limit"])
def test_the_limit_of_clamped_experts_is_kept(name, limit):
    kind = with_activation(lambda x, y: F.silu(x.clamp(max=limit)) * y.clamp(-limit, limit))
    experts = kind()
    setattr(experts, name, limit)
    assert convert(experts).swiglu_limit == limit


def test_a_layer_that_differs_from_the_others_is_probed_by_itself():
    model = Model(Experts)
    model.layers[1]["experts"] = FOREIGN["scaled"][0]()
    with pytest.raises(ValueError, match=r"convert: layers\.1\.experts \(Own\)"):
        convert(model)
    model = Model(Experts)
    model.layers[2]["experts"].act_fn = nn.ReLU()
    with pytest.raises(ValueError, match=r"convert: layers\.2\.experts"):
        convert(model)


class ByAttribute(Experts):
    scale: object = (1.0,)

    def activate(self, gate, up):
        scale = self.scale
        return super().activate(gate, up) * (scale() if callable(scale) else scale[0])


@pytest.mark.parametrize(
    "other",
    [(1.5,), [1.5], {0: 1.5}, torch.tensor([1.5]), lambda: 1.5],
    ids=lambda other: type(other).__name__,
)
def test_what_an_attribute_holds_may_make_a_layer_differ(other):
    model = Model(ByAttribute)
    model.layers[0]["experts"].scale = lambda: 1.0
    model.layers[1]["experts"].scale = other
    with pytest.raises(ValueError, match=r"convert: layers\.1\.experts"):
        convert(model)


@pytest.mark.parametrize("num_experts", [1, 2, 3])
def test_few_experts_that_know_the_id_of_others(num_experts):
    experts = moefp8.layers.conversion.plain.PlainExperts(num_experts, H, I)
    assert isinstance(convert(experts), GroupedExperts)


def test_a_limit_of_infinity_is_none():
    assert convert(Experts(limit=float("inf"))).swiglu_limit is None


@pytest.mark.parametrize("is_used", [True, False])
def test_a_limit_that_is_seldom_reached_is_kept_if_it_is_used(is_used):
    class Limited(Experts):
        swiglu_limit = 150.0

        def activate(self, gate, up):
            if is_used:
                gate, up = gate.clamp(max=150.0), up.clamp(-150.0, 150.0)
            return super().activate(gate, up)

    assert convert(Limited()).swiglu_limit == (150.0 if is_used else None)


def test_autocast_around_a_conversion_changes_nothing():
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(convert(Experts()), GroupedExperts)


class OfLayer(Experts):
    def __init__(self, layer_idx, factor=1.0):
        super().__init__()
        self.layer_idx = layer_idx
        self.register_buffer("factor", torch.tensor([factor]), persistent=False)

    def expert(self, x, expert):
        return self.factor * super().expert(x, expert)


class KnowsItsLayer(OfLayer):
    def expert(self, x, expert):
        return super().expert(x, expert) * (1 if self.layer_idx < 2 else 1.5)


class AsksForItsLayer(OfLayer):
    def expert(self, x, expert):
        return super().expert(x, expert) * (1 if getattr(self, "layer" + "_idx") < 2 else 1.5)


class NumProducts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **kwargs or {})


def num_products(*experts: nn.Module) -> int:
    with NumProducts() as counted:
        plan_conversion(nn.ModuleList(experts))
    return counted.count


def test_layers_that_differ_in_their_number_share_a_trial():
    assert num_products(*map(OfLayer, range(3))) == num_products(OfLayer(0)) > 0
    with pytest.raises(ValueError, match="convert: 1 "):
        plan_conversion(nn.ModuleList([OfLayer(0), OfLayer(1, factor=1.5)]))
    for kind in KnowsItsLayer, AsksForItsLayer:
        with pytest.raises(ValueError, match="convert: 2 "):
            plan_conversion(nn.ModuleList(map(kind, range(3))))


class NoActFn(Experts):
    """Its activation is right, though nothing but its forward tells."""

    def __init__(self):
        super().__init__()
        del self.act_fn

    def activate(self, gate, up):
        return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("kind", [NoActFn, DbrxLike, VllmLike])
def test_experts_are_known_by_what_they_compute(kind):
    experts, x, index = kind(), torch.randn(9, H), torch.randint(E, (9, 2))
    weights = torch.rand(9, 2)
    wanted = experts(x, index, weights).detach()
    ours = convert(experts)
    assert isinstance(ours, GroupedExperts)
    assert relative_error(ours(x, index, weights), wanted) < 0.1


def test_stacks_called_w13_and_w2_are_tried_as_others_are():
    class UpFirst(VllmLike):
        def forward(self, x, index, weights):
            order = torch.cat([torch.arange(I, 2 * I), torch.arange(I)])
            twin = VllmLike()
            twin.w13, twin.w2 = nn.Parameter(self.w13[:, order]), self.w2
            return VllmLike.forward(twin, x, index, weights)

    assert_refused(UpFirst, OFF, torch.float32)
    experts = VllmLike()
    experts.w13 = nn.Parameter(experts.w13.detach().mT.contiguous())
    with pytest.raises(ValueError, match=r"must hold w13 \[E, 2I, H\] and w2 \[E, H, I\], got"):
        convert(experts)


def test_stacks_called_w13_and_w2_become_master_weights():
    experts = VllmLike()
    w13, w2 = experts.w13, experts.w2
    ours = convert(experts, trainable=True)
    assert (ours.gate_up_proj, ours.down_proj) == (w13, w2)


def test_to_choose_copies_no_experts():
    experts = DbrxLike(num_experts=256, intermediate_size=512)
    assert peak(lambda: plan_conversion(experts)) < experts.mlp.w1.nbytes


def test_other_experts_stay_and_that_is_said():
    class NoGate(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(E, I, H))
            self.down_proj = nn.Parameter(torch.randn(E, H, I))

    model = nn.ModuleDict({"proj": nn.Linear(H, H), "experts": NoGate()})
    ways = r"GroupedExperts\.from_weights.*experts_implementation=\"moefp8\""
    with pytest.warns(UserWarning, match=rf"experts stay in 16 bits: .*NoGate.*{ways}"):
        _, conversion = convert(model, return_conversion=True)
    assert conversion.swapped == {"proj": "linear"}
    assert "another make" in conversion.kept["experts"]
