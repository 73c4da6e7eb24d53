"""`convert` and experts of others: run before they are swapped, refused if not as ours."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moefp8.layers.conversion.plain
from moefp8 import GroupedExperts, convert
from moefp8.layers import plan_conversion
from moefp8.testing import relative_error
from tests.layers.plain_experts import PlainExperts as Experts

E, H, I = 4, 64, 40


class UpFirst(Experts):
    def activate(self, gate, up):
        return self.act_fn(up) * gate


class PlusOne(Experts):
    def activate(self, gate, up):
        return self.act_fn(gate) * (up + 1)


class Scaled(Experts):
    def forward(self, *inputs):
        return 1.5 * super().forward(*inputs)


class ScaledByBuffer(Experts):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor([1.0, 1.0, 1.1, 1.0]))

    def expert(self, x, expert):
        return self.factor[expert] * super().expert(x, expert)


class ScaledByHiddenBuffer(ScaledByBuffer):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", self.factor, persistent=False)


class Scaled4Percent(Experts):
    def forward(self, *inputs):
        return 1.04 * super().forward(*inputs)


class LastIsOther(Experts):
    def __init__(self):
        super().__init__(num_experts=16)

    def expert(self, x, expert):
        return super().expert(x, expert) * (3 if expert == 15 else 1)


class Capacity(Experts):
    """Of an expert's tokens, those after the fourth are dropped."""

    def forward(self, x, index, weights):
        rank = F.one_hot(index, E).sum(1).cumsum(0)
        return super().forward(x, index, weights * (rank.gather(1, index) <= 4))


class ManyTokens(Experts):
    def forward(self, hidden_states, *others):
        return super().forward(hidden_states, *others) * (2 if len(hidden_states) > 30 else 1)


class ByChoices(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        scale = 2 / top_k_index.shape[1]
        return super().forward(hidden_states, top_k_index, top_k_weights * scale)


class ClampedScores(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.clamp(min=0.1))


class Positive(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.abs())


class Identity(Experts):
    """The id E is an expert that gives back what it gets."""

    def expert(self, x, expert):
        return x if expert == E else super().expert(x, expert)


class Counts(Experts):
    num_calls = 0

    def forward(self, *inputs):
        self.num_calls += 1
        return super().forward(*inputs)


class CountsInBuffer(Experts):
    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(E), persistent=False)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        self.counts += top_k_index.flatten().bincount(minlength=E)
        return super().forward(hidden_states, top_k_index, top_k_weights)


class OtherCall(Experts):
    def __call__(self, *inputs):
        return 3 * super().__call__(*inputs)


class Unweighted(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, torch.ones_like(top_k_weights))


class OtherExpert(Experts):
    def expert(self, x, expert):
        return super().expert(x, (expert + 1) % E)


class Clamped(Experts):
    """A limit under a name that nobody knows."""

    def activate(self, gate, up):
        return super().activate(gate.clamp(max=7.0), up.clamp(-7.0, 7.0))


class OtherForward(Experts):
    def forward(self, hidden_states):
        return hidden_states


class TwoResults(Experts):
    def forward(self, *inputs):
        return super().forward(*inputs), inputs[1]


FOREIGN = {
    UpFirst: "its up rows come before its gate rows",
    PlusOne: r"up to \d+ % off",
    Scaled: r"up to 5\d % off",
    ScaledByBuffer: r"no buffers that are saved, got \['factor'\]",
    ScaledByHiddenBuffer: r"up to \d+ % off",
    Scaled4Percent: r"up to [45] % off",
    LastIsOther: r"up to \d+ % off",
    Capacity: r"on 64 random tokens of 1 choices, .* up to 100 % off",
    ManyTokens: r"on 64 random tokens",
    ByChoices: r"up to \d+ % off",
    ClampedScores: r"up to \d+ % off",
    Positive: r"up to \d+ % off",
    Identity: "must count the id E with weight 0",
    Counts: "changes nothing in it, but that changes num_calls",
    CountsInBuffer: "changes nothing in it, but that changes counts",
    OtherCall: "must have no hooks and no forward of its own",
    Unweighted: r"up to \d+ % off",
    OtherExpert: r"up to \d+ % off",
    Clamped: r"up to \d+ % off",
    OtherForward: r"must have forward.* raised TypeError",
    TwoResults: "must give one tensor .*, got tuple",
}


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"proj": nn.Linear(H, H), "experts": make()}) for _ in range(3)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FOREIGN, ids=lambda kind: kind.__name__)
def test_experts_that_compute_otherwise_are_refused_with_the_way_out(kind, dtype):
    model = Model(kind).to(dtype)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=FOREIGN[kind]) as caught:
        convert(model)
    message = str(caught.value)
    assert message.count("convert: ") == 1, "all layers in one sentence"
    assert "layers.0.experts and 2 more" in message
    assert "skip='layers.*.experts'" in message
    assert "GroupedExperts.from_weights" in message
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    convert(model, skip="layers.*.experts")
    assert {type(layer["experts"]) for layer in model.layers} == {kind}


@pytest.mark.parametrize("kind", [UpFirst, PlusOne, Scaled, Clamped])
def test_so_are_they_on_the_meta_device(kind):
    with torch.device("meta"):
        model = Model(kind)
    with pytest.raises(ValueError, match=FOREIGN[kind]):
        convert(model)


@pytest.mark.parametrize("wanted", [OtherExpert, Experts])
def test_large_experts_are_run_with_their_own_weights(wanted):
    large = wanted()
    large.gate_up_proj = nn.Parameter(torch.randn(E, 2 * 2048, 1024).bfloat16() * 0.05)
    large.down_proj = nn.Parameter(torch.randn(E, 1024, 2048).bfloat16() * 0.05)
    if wanted is OtherExpert:
        with pytest.raises(ValueError, match=r"up to \d+ % off"):
            convert(large)
        return
    assert isinstance(convert(large), GroupedExperts)
    for empty in (0.0, torch.nan):
        large = Experts()
        large.gate_up_proj = nn.Parameter(torch.full((E, 2 * 2048, 1024), empty).bfloat16())
        large.down_proj = nn.Parameter(torch.full((E, 1024, 2048), empty).bfloat16())
        assert plan_conversion(large).swapped, "they may be filled later"


class NoActFn(Experts):
    """Right, though nothing but its forward tells."""

    def __init__(self):
        super().__init__()
        del self.act_fn

    def activate(self, gate, up):
        return gate * torch.sigmoid(gate) * up


def test_experts_are_known_by_what_they_compute():
    experts = NoActFn()
    x, index = torch.randn(9, H), torch.randint(E, (9, 2))
    weights = torch.rand(9, 2)
    wanted = experts(x, index, weights).detach()
    ours = convert(experts)
    assert isinstance(ours, GroupedExperts)
    assert relative_error(ours(x, index, weights), wanted) < 0.1


@pytest.mark.parametrize("limit", [0.5, 7.0, 30.0])
@pytest.mark.parametrize("name", ["limit", "swiglu_limit"])
def test_the_limit_of_clamped_experts_is_kept(name, limit):
    class Limited(Experts):
        def activate(self, gate, up):
            return super().activate(gate.clamp(max=limit), up.clamp(-limit, limit))

    experts = Limited()
    setattr(experts, name, limit)
    assert convert(experts).swiglu_limit == limit


def test_a_layer_that_differs_from_the_others_is_probed_by_itself():
    model = Model(Experts)
    model.layers[1]["experts"] = Scaled()
    with pytest.raises(ValueError, match=r"convert: layers\.1\.experts \(Scaled\)"):
        convert(model)
    model = Model(Experts)
    model.layers[2]["experts"].act_fn = nn.GELU()
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
    experts = Experts()
    experts.limit = float("inf")
    assert convert(experts).swiglu_limit is None


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


def test_a_probe_leaves_no_trace():
    experts, other, third = Experts().train(), CountsInBuffer(), Counts()
    names = {name: id(x) for name, x in experts.named_parameters()}
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="changes counts"):
        convert(nn.ModuleList([experts, other, third]))
    assert not other.counts.any()
    assert "num_calls" not in vars(third)
    assert experts.training
    assert {name: id(x) for name, x in experts.named_parameters()} == names
    assert torch.equal(torch.random.get_rng_state(), state)


class DbrxLike(nn.Module):
    """Gate, up and down's transpose, each [E * I, H], in a child called mlp."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.mlp = E, nn.Module()
        for name in ("w1", "v1", "w2"):
            setattr(self.mlp, name, nn.Parameter(torch.randn(E * I, H) * 0.1))

    def forward(self, x, index, weights):
        w1, v1, w2 = (w.view(-1, I, H) for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
        y = torch.zeros_like(x)
        for token, chosen in enumerate(index.tolist()):
            for choice, expert in enumerate(chosen):
                inner = F.silu(w1[expert] @ x[token]) * (v1[expert] @ x[token])
                y[token] += weights[token, choice] * (inner @ w2[expert])
        return y


def test_experts_as_dbrx_has_them():
    experts, x, index = DbrxLike(), torch.randn(9, H), torch.randint(E, (9, 2))
    weights = torch.rand(9, 2)
    wanted = experts(x, index, weights).detach()
    ours = convert(experts)
    assert isinstance(ours, GroupedExperts)
    assert relative_error(ours(x, index, weights), wanted) < 0.1


def test_to_choose_copies_no_experts():
    """Here a row stands for all: their copy would be larger than any memory."""
    experts = DbrxLike()
    experts.num_experts = 2**31
    for name, weight in list(experts.mlp.named_parameters()):
        row = weight.detach()[:1].expand(experts.num_experts * I, H)
        setattr(experts.mlp, name, nn.Parameter(row, requires_grad=False))
    assert plan_conversion(nn.Sequential(experts)).swapped == {"0": "experts"}


def test_other_experts_stay_and_that_is_said():
    class NoGate(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(E, I, H))
            self.down_proj = nn.Parameter(torch.randn(E, H, I))

    model = nn.ModuleDict({"proj": nn.Linear(H, H), "experts": NoGate()})
    with pytest.warns(UserWarning, match=r"experts stay in 16 bits: .*NoGate"):
        _, conversion = convert(model, return_conversion=True)
    assert conversion.swapped == {"proj": "linear"}
    assert "another make" in conversion.kept["experts"]
