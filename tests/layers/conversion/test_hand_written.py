"""`convert` and experts in a list: they are stacked where a trial shows the same outputs."""

import copy
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts, convert
from moefp8.layers import PlainExperts, plan_conversion
from moefp8.testing import relative_error
from tests.gpu import on_gpu
from tests.layers.conversion.hand_written import (
    EveryExpert,
    FeedForward,
    Fused,
    H,
    I,
    InDict,
    Masked,
    Model,
    PlainTokens,
    Scaled,
    Sigmoid,
    Sparse,
    WithLogits,
    convert_with_warning,
    of_experts,
    with_forward,
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
    InDict,
    of_experts(Fused),
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


@on_gpu
@pytest.mark.parametrize("kind", [Sparse, Masked])
def test_on_a_gpu_it_is_tried_there_and_one_graph_serves_every_routing(kind):
    torch.manual_seed(0)
    block, x = kind().cuda().bfloat16(), tokens(kind, torch.bfloat16).cuda()
    wanted = block(x).detach()
    ours = convert(nn.ModuleDict({"moe": block}))["moe"]
    assert isinstance(getattr(ours, "ffns" if kind is Masked else "experts"), GroupedExperts)
    with torch.inference_mode():
        other = torch.randn_like(x)
        ours(other)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ours(other)
        other.copy_(x)
        graph.replay()
    assert relative_error(y, wanted) < 0.13


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
