"""`convert`: what is swapped, what is left, and what is refused before anything changes."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from moefp8 import FP8Linear, GroupedExperts, convert
from moefp8.testing import relative_error
from tests.layers.conversion.plain_experts import PlainExperts as Experts


class Block(nn.Module):
    def __init__(self, **experts):
        super().__init__()
        self.proj, self.gate, self.experts = nn.Linear(64, 64), nn.Linear(64, 4), Experts(**experts)

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2)
        return self.proj(x) + self.experts(x, index, weights)


def kinds(model):
    return {name: type(m).__name__ for name, m in model.named_modules() if "." not in name and name}


@pytest.mark.parametrize("limit", [None, 0.1])
def test_swaps_linears_and_experts_and_keeps_routers(limit):
    model, x = Block(limit=limit), torch.randn(20, 64)
    before = model(x).detach()
    assert convert(model) is model
    assert kinds(model) == {"proj": "FP8Linear", "gate": "Linear", "experts": "GroupedExperts"}
    assert model.experts.swiglu_limit == limit
    assert relative_error(model(x), before) < 0.08


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ((), {"lm_head"}),
        (("lm_head", "router"), {"lm_head"}),
        ("block", {"lm_head", "block.proj"}),
        (["proj"], {"lm_head", "block.proj"}),
        (("bl*",), {"lm_head", "block.proj"}),
    ],
)
@pytest.mark.filterwarnings("ignore:convert")
def test_skip_adds_names_parts_and_patterns_to_the_defaults(skip, left):
    model = nn.ModuleDict(
        {"lm_head": nn.Linear(8, 8), "block": nn.ModuleDict({"proj": nn.Linear(8, 8)})}
    )
    convert(model, skip=skip)
    kept = {name for name, m in model.named_modules() if type(m) is nn.Linear}
    assert kept == left


def test_only_takes_exact_names():
    model = Block()
    convert(model, only=["gate"])
    assert kinds(model) == {"proj": "Linear", "gate": "FP8Linear", "experts": "PlainExperts"}
    with pytest.raises(ValueError, match=r"only must be an nn\.Linear .*got head"):
        convert(model, only=["proj", "head"])
    assert type(model.proj) is nn.Linear
    convert(model, only="gate")  # FP8 already


def test_a_shared_module_stays_shared():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model.append(model[0])
    convert(model)
    assert isinstance(model[0], FP8Linear)
    assert model[0] is model[2]


def test_encoder_layers_are_left_alone():
    """Their fast path reads the weights of their linears."""
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(encoder, nn.Linear(16, 16))
    convert(model).eval()
    assert [type(m) for m in (model[0].linear1, model[1])] == [nn.Linear, FP8Linear]
    with torch.no_grad():
        assert model(torch.randn(2, 3, 16)).isfinite().all()


@pytest.mark.parametrize("name", ["proj", "experts"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: module.register_forward_pre_hook(lambda module, x: None),
        lambda module: module.register_full_backward_hook(lambda module, x, y: None),
        lambda module: setattr(module, "forward", lambda *x: 2 * type(module).forward(module, *x)),
    ],
)
def test_hooks_and_patches_are_not_lost_silently(name, wrap):
    model = Block()
    wrap(model.get_submodule(name))
    with pytest.raises(ValueError, match=rf"convert: {name} .* no hooks and no forward of its own"):
        convert(model)
    assert type(model.experts) is Experts
    convert(model, skip=name)


def test_what_else_a_linear_holds_is_not_lost_silently():
    model = Block()
    model.proj.register_buffer("smooth", torch.ones(3))
    with pytest.raises(ValueError, match=r"proj .* no tensors but weight and bias, got .*smooth"):
        convert(model)


def test_default_dtypes_do_not_matter():
    try:
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            model = Block().float()
            assert kinds(convert(model))["experts"] == "GroupedExperts"
            assert FP8Linear(8, 8).weight_scale_inv.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_other_dtypes_are_refused_with_the_way_out_and_nothing_changes():
    model = nn.ModuleList([Block()])
    model[0].gate.double()
    rule = r"convert: 0\.gate\.weight must be .*, got float64.*pass skip='\*\.gate'"
    with pytest.raises(TypeError, match=rule):
        convert(model, overrides={"gate": True})
    assert type(model[0].proj) is nn.Linear


def test_a_meta_model_is_swapped_without_weights():
    with torch.device("meta"):
        model = Block()
        convert(model)
    assert kinds(model)["experts"] == "GroupedExperts"
    assert all(x.is_meta for x in model.state_dict().values())
    assert model.experts.gate_up_proj_scale_inv.shape == (4, 2, 1)


def test_mode_and_bias_are_kept():
    model = Block().eval()
    bias = model.proj.bias.detach().clone()
    convert(model)
    assert not any(m.training for m in model.modules())
    assert torch.equal(model.proj.bias, bias)


def test_converting_twice_changes_nothing():
    model = convert(Block())
    experts, proj = model.experts, model.proj
    convert(model)
    assert (model.experts, model.proj) == (experts, proj)


class Gelu(Experts):
    def activate(self, gate, up):
        return F.gelu(gate) * up


def with_attribute(name, value):
    def make():
        experts = Experts()
        setattr(experts, name, value)
        return experts

    return make


def transposed():
    experts = Experts()
    experts.gate_up_proj = nn.Parameter(torch.randn(4, 64, 80))
    return experts


def without_gate():
    experts = nn.Module()
    experts.gate_up_proj, experts.down_proj = Experts().gate_up_proj, Experts().down_proj
    return experts


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Gelu, "must compute silu"),
        (with_attribute("is_transposed", True), r"gate_up_proj \[E, H, 2I\].* got \[4, 80, 64\]"),
        (with_attribute("is_concatenated", False), "must compute silu"),
        (with_attribute("extra", nn.Parameter(torch.ones(1))), r"no parameters but .*\['extra'\]"),
        (transposed, r"got \[4, 64, 80\] and \[4, 64, 40\]"),
        (without_gate, "must have forward"),
    ],
)
def test_other_experts_are_refused_and_nothing_changes(make, message):
    model = Block()
    model.experts = make()
    with pytest.raises(ValueError, match=f"convert: experts .*{message}.*pass skip='experts'"):
        convert(model)
    assert type(model.proj) is nn.Linear
    convert(model, skip=("experts", "gate"))
    assert kinds(model)["experts"] != "GroupedExperts"
    assert isinstance(model.proj, FP8Linear)


def test_quantized_weights_are_those_of_each_expert():
    experts = Experts(hidden_size=200, intermediate_size=150)
    ours = GroupedExperts.from_weights(experts.gate_up_proj, experts.down_proj)
    one = GroupedExperts.from_weights(experts.gate_up_proj[2:3], experts.down_proj[2:3])
    for name in ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv"):
        ours_bytes = getattr(ours, name)[2].contiguous().view(torch.uint8)
        assert torch.equal(ours_bytes, getattr(one, name)[0].contiguous().view(torch.uint8))


@pytest.mark.parametrize(("progress", "is_shown"), [(True, True), (False, False), (None, False)])
def test_progress_is_shown_on_a_terminal_alone(capsys, progress, is_shown):
    model = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
    convert(model, progress=progress)
    shown = capsys.readouterr().err
    assert ("quantizing 100 %" in shown, bool(shown)) == (is_shown, is_shown)
    with torch.device("meta"):
        nothing_to_quantize = nn.ModuleList([nn.Linear(256, 256)])
    convert(nothing_to_quantize, progress=progress)
    assert not capsys.readouterr().err


# All or nothing


def in_buffer(experts):
    gate_up_proj = experts.gate_up_proj.detach()
    del experts.gate_up_proj
    experts.register_buffer("gate_up_proj", gate_up_proj)


def in_hidden_buffer(experts):
    down_proj = experts.down_proj.detach()
    del experts.down_proj
    experts.register_buffer("down_proj", down_proj, persistent=False)


def in_parametrization(experts):
    parametrize.register_parametrization(experts, "down_proj", nn.Identity())


def partly_on_meta(name):
    return lambda experts: experts.register_parameter(
        name, nn.Parameter(getattr(experts, name).to("meta"))
    )


def without_experts(experts):
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[:0].detach())
    experts.down_proj = nn.Parameter(experts.down_proj[:0].detach())


class Wrapped(torch.Tensor):
    """Each of its operations raises, as those of sharded and quantized tensors may."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0])
        raise NotImplementedError(func)


def of_weight(change):
    def spoil(linear):
        linear.weight = nn.Parameter(change(linear.weight.detach()))

    return spoil


class Strict(nn.Module):
    """It holds linears alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def __setattr__(self, name, value):
        if name == "linear" and not isinstance(value, nn.Linear):
            raise TypeError("linear must be an nn.Linear")
        super().__setattr__(name, value)


class TakesNoMore(Strict):
    """It refuses even the linear that it had, once it has refused another."""

    is_closed = False

    def __setattr__(self, name, value):
        if name == "linear" and self.is_closed:
            raise TypeError("linear is closed")
        if isinstance(value, FP8Linear):
            self.is_closed = True
        super().__setattr__(name, value)


def test_a_parent_that_refuses_its_original_keeps_no_other_from_its_place():
    model = nn.ModuleList([nn.Linear(64, 64), TakesNoMore(), nn.Linear(64, 64)])
    linears = model[0], model[2]
    with (
        pytest.warns(
            UserWarning, match=r"1\.linear could not be put back.*linear is closed"
        ) as said,
        pytest.raises(TypeError, match=r"must be an nn\.Linear"),
    ):
        convert(model, skip=None)
    assert {x.filename for x in said} == {__file__}
    assert (model[0], model[2]) == linears


SPOILT = {
    "buffer": ("experts", in_buffer, "must hold gate_up_proj as a parameter, got a buffer"),
    "hidden buffer": ("experts", in_hidden_buffer, "must hold down_proj as a parameter"),
    "parametrization": ("experts", in_parametrization, "must have no parameters but"),
    "gate and up on meta": ("experts", partly_on_meta("gate_up_proj"), "one device, got cpu, meta"),
    "down on meta": ("experts", partly_on_meta("down_proj"), "on one device, got cpu, meta"),
    "no experts": ("experts", without_experts, r"must hold weights, got .*\[0, 80, 64\]"),
    "other dtype": ("last", lambda x: x.double(), "must be bfloat16 or .*, got float64"),
    "sparse": ("last", of_weight(torch.Tensor.to_sparse_csr), "dense tensor, got layout sparse"),
    "subclass": ("last", of_weight(Wrapped), "weight as a plain tensor, got a Wrapped"),
    "strict": ("last", lambda x: x.add_module("child", Strict()), "must be an nn.Linear"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("case", SPOILT)
def test_all_becomes_fp8_or_nothing(case, trainable):
    name, spoil, rule = SPOILT[case]
    model = nn.ModuleList(
        nn.ModuleDict({"first": nn.Linear(64, 64), "experts": Experts(), "last": nn.Linear(64, 64)})
        for _ in range(2)
    )
    if case == "strict":
        model[1]["last"] = nn.Module()
    spoil(model[1][name])
    modules = list(model.named_modules())
    tensors = [(n, id(x), x.requires_grad) for n, x in model.named_parameters()]
    with pytest.raises((ValueError, TypeError), match=rule):
        convert(model, trainable=trainable)
    assert list(model.named_modules()) == modules
    assert [(n, id(x), x.requires_grad) for n, x in model.named_parameters()] == tensors


class Interrupted:
    """A terminal that is closed: each write fails."""

    def isatty(self):
        return True

    def flush(self):
        pass

    def write(self, text):
        raise BrokenPipeError


def test_an_interruption_leaves_each_module_whole_and_convert_goes_on(monkeypatch):
    """Originals are freed in turn, so that what was quantized stays."""
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(128, 128), Experts()])
    originals, x = list(model), torch.randn(3, 128)
    monkeypatch.setattr("sys.stderr", Interrupted())
    with pytest.raises(BrokenPipeError):
        convert(model)
    assert list(model)[:1] == originals[:1]
    assert [type(m) for m in model] == [nn.Linear, nn.Linear, GroupedExperts]
    monkeypatch.undo()
    convert(model)
    assert [type(m) for m in model] == [FP8Linear, FP8Linear, GroupedExperts]
    assert torch.equal(model[1](x), FP8Linear.from_linear(originals[1])(x))


def test_originals_are_freed_one_by_one():
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    originals = [weakref.ref(linear.weight) for linear in model]
    alive = []

    class Terminal(Interrupted):
        def write(self, text):
            alive.append(sum(x() is not None for x in originals))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", Terminal())
        patch.setattr("time.monotonic", iter(range(10**6)).__next__)
        convert(model)
    assert alive[:4] == [3, 2, 1, 0]
