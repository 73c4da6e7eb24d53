"""The two forms of FP8 modules: frozen codes, and master weights that train."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts, freeze, unfreeze
from moefp8.adapters import add_lora
from moefp8.layers import PlainExperts
from moefp8.testing import relative_error
from tests.layers.training.trainable_cases import (
    DTYPES,
    KINDS,
    H,
    arguments_of,
    fresh,
    make,
    output,
)


def test_freeze_and_unfreeze_keep_ties():
    model = nn.ModuleDict({"a": FP8Linear(H, H), "b": FP8Linear(H, H)})
    model["c"] = GroupedExperts(2, H, 40)
    model["d"] = GroupedExperts(2, H, 40)
    for leaf in ("weight", "weight_scale_inv"):
        setattr(model["b"], leaf, getattr(model["a"], leaf))
    for leaf in ("down_proj", "down_proj_scale_inv"):
        setattr(model["d"], leaf, getattr(model["c"], leaf))
    codes = {name: x.clone() for name, x in model.state_dict().items()}
    for change in (unfreeze, freeze):
        assert change(model) is model
        assert model["a"].weight is model["b"].weight
        assert model["c"].down_proj is model["d"].down_proj
        assert model["c"].gate_up_proj is not model["d"].gate_up_proj
    assert model["a"].weight_scale_inv is model["b"].weight_scale_inv
    assert model["c"].down_proj_scale_inv is model["d"].down_proj_scale_inv
    assert codes.keys() == model.state_dict().keys()


def test_unfreeze_refuses_before_anything_is_changed():
    model = nn.Sequential(FP8Linear(256, 256), FP8Linear(256, 256))
    for bad, error, message in (
        ({"dtype": torch.float64}, TypeError, "unfreeze: dtype must be one of torch.bfloat16"),
        ({"wgrad": "fp8"}, ValueError, "unfreeze: wgrad must be '128x1'"),
    ):
        with pytest.raises(error, match=message):
            unfreeze(model, **bad)
    add_lora(model, rank=2, targets=["1"])
    with pytest.raises(ValueError, match=r"unfreeze: the model must have no adapters"):
        unfreeze(model)
    assert not model[0].trainable
    cut = nn.Sequential(FP8Linear(256, 256), FP8Linear(256, 256))
    moefp8.shard(cut, {"1": "rows"}, rank=0, num_ranks=2)
    with pytest.raises(ValueError, match=r"unfreeze: 1 is one rank's part of a layer"):
        unfreeze(cut)
    assert not cut[0].trainable


def test_freeze_tells_of_weights_that_are_not_finite():
    model = nn.Sequential(FP8Linear(H, H, trainable=True), FP8Linear(H, H, trainable=True))
    with torch.no_grad():
        model[1].weight[3, 3] = torch.inf
    with pytest.warns(UserWarning, match=r"freeze: weights of 1 hold NaN or Inf"):
        freeze(model)


@pytest.mark.parametrize(
    ("name", "weight", "error"),
    [
        ("down_proj", torch.randn(2, H, 32).double(), "quantize_128x128: w must be"),
        ("down_proj", torch.randn(3, H, 32), r"down_proj must be \[E, H, I\] = \[2, "),
        ("gate_up_proj", torch.randn(2, 60, H), r"gate_up_proj must be \[E, 2I, H\]"),
    ],
)
def test_experts_that_cannot_be_frozen_keep_their_master_weights(name, weight, error):
    experts = GroupedExperts(2, H, 32, trainable=True)
    experts.get_parameter(name).data = weight
    before = {name: x.detach().clone() for name, x in experts.named_parameters()}
    with pytest.raises((TypeError, ValueError), match=error):
        experts.freeze()
    assert experts.trainable
    for name, x in experts.named_parameters():
        assert torch.equal(x, before[name])


# ---- What a module computes ----


@KINDS
@DTYPES
def test_a_frozen_module_computes_the_same(kind, dtype):
    module = make(kind, dtype=dtype)
    y = output(module, kind)
    codes = copy.deepcopy(module).freeze()
    assert torch.equal(output(codes, kind), y)
    assert not codes.trainable
    assert codes.fp8_names == module.master_names
    assert not any(x.requires_grad for x in codes.parameters())
    assert codes.freeze() is codes
    again = codes.unfreeze(dtype)
    assert again is codes
    assert again.trainable
    assert all(x.requires_grad and x.dtype == dtype for x in again.parameters())
    assert relative_error(output(again, kind), y) < 0.01  # codes are nearly those they came from


@KINDS
def test_parameters_are_those_of_the_plain_module(kind):
    plain = nn.Linear(H, 24) if kind == "linear" else PlainExperts(3, H, 40)
    if kind == "linear":
        module = FP8Linear.from_linear(plain, trainable=True)
    else:
        module = GroupedExperts.from_weights(
            plain.gate_up_proj, plain.down_proj, trainable=True, wgrad="bf16"
        )
    assert dict(module.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert all(x is plain.get_parameter(name) for name, x in module.named_parameters())


# ---- Codes follow weights ----


class Momentum(torch.optim.Optimizer):
    """One that writes through `.data`, as many do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for x in group["params"]:
                x.data = x.data - group["lr"] * x.grad  # new memory
                x.data.mul_(0.99)  # the same memory


OPTIMIZERS = {
    "sgd": lambda x: torch.optim.SGD(x, 0.1, momentum=0.9),
    "adamw": lambda x: torch.optim.AdamW(x, 1e-2),
    "fused": lambda x: torch.optim.AdamW(x, 1e-2, fused=True),
    "data": Momentum,
}


@KINDS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clips", [True, False])
def test_codes_are_those_of_each_step(kind, optimizer, clips):
    module = make(kind, dtype=torch.float32)
    steps, outputs = OPTIMIZERS[optimizer](module.parameters()), []
    for _ in range(3):
        y = module(*arguments_of(kind))
        outputs.append(y.detach())
        assert torch.equal(y, fresh(module, kind))
        y.square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        steps.step()
        steps.zero_grad()
    assert torch.equal(output(module, kind), fresh(module, kind))
    assert not torch.equal(outputs[0], outputs[2])


def average(module: Any, target: dict[str, torch.Tensor], how: str) -> None:
    for name, x in module.named_parameters():
        if how == "lerp":
            with torch.no_grad():
                x.lerp_(target[name], 0.9)
        elif how == "data":
            x.data.lerp_(target[name], 0.9)
        else:
            x.data.copy_(target[name])


@KINDS
@pytest.mark.parametrize("how", ["lerp", "data", "swap"])
def test_averages_are_seen_in_eval_and_the_trained_weights_behind_them(kind, how):
    module, other = make(kind, dtype=torch.float32), make(kind, dtype=torch.float32)
    target = {name: torch.randn_like(x) for name, x in other.named_parameters()}
    kept = {name: x.detach().clone() for name, x in module.named_parameters()}
    y = module(*arguments_of(kind)).detach()
    module.eval()
    average(module, target, how)
    of_average = output(module, kind)
    assert torch.equal(of_average, fresh(module, kind))
    assert not torch.equal(of_average, y)
    average(module, kept, "swap")
    module.train()
    assert torch.equal(output(module, kind), y)


@KINDS
def test_a_load_is_seen(kind):
    module, other = make(kind), make(kind)
    with torch.no_grad():
        for x in other.parameters():
            x.normal_()
    output(module, kind)
    module.load_state_dict(other.state_dict())
    assert torch.equal(output(module, kind), output(other, kind))
    output(module, kind)
    module.load_state_dict(make(kind).state_dict(), assign=True)
    assert torch.equal(output(module, kind), output(make(kind), kind))


@KINDS
def test_gradients_accumulate(kind):
    module, loads = make(kind, dtype=torch.float32), 3
    module(*arguments_of(kind)).square().sum().backward()
    once = {name: x.grad.clone() for name, x in module.named_parameters()}
    for _ in range(loads - 1):
        module(*arguments_of(kind)).square().sum().backward()
    for name, x in module.named_parameters():
        torch.testing.assert_close(x.grad, loads * once[name])


# ---- What handles modules ----


@KINDS
def test_dequantize_gives_the_parameters_back(kind):
    module = nn.Sequential(make(kind, dtype=torch.float32).eval())
    parameters = dict(module.named_parameters())
    parameters[f"0.{module[0].master_names[0]}"].requires_grad_(False)
    plain = moefp8.dequantize(copy.copy(module))[0]
    assert type(plain) is (nn.Linear if kind == "linear" else PlainExperts)
    assert not plain.training
    assert all(x is parameters[f"0.{name}"] for name, x in plain.named_parameters())
    module = nn.Sequential(make(kind, dtype=torch.float32))
    cast = moefp8.dequantize(module, torch.bfloat16)[0]
    assert all(x.dtype == torch.bfloat16 and x.requires_grad for x in cast.parameters())


@KINDS
def test_adapters_want_frozen_weights(kind):
    model = nn.Sequential(make(kind))
    with pytest.raises(ValueError, match=r"add_lora: 0 .* must be frozen.*moefp8\.freeze\(model\)"):
        add_lora(model, rank=2)
    assert model[0].trainable
    assert all(x.requires_grad for x in model.parameters())
    assert add_lora(freeze(model), rank=2)


def test_frozen_parameters_are_those_that_ask_for_no_gradient():
    model = nn.ModuleDict({"a": make("linear"), "b": make("experts", trainable=False)})
    model["a"].weight.requires_grad_(False)
    assert {*moefp8.frozen_parameters(model)} == {
        "a.weight",
        *(f"b.{name}" for name in model["b"].state_dict()),
    }


@pytest.mark.parametrize("function", [moefp8.freeze, moefp8.unfreeze])
def test_a_model_without_fp8_is_told(function):
    with pytest.warns(UserWarning, match=r"no FP8 modules, so nothing .* moefp8\.convert\(model\)"):
        function(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got str"):
        function("model")


@KINDS
@pytest.mark.parametrize("function", [moefp8.freeze, moefp8.dequantize])
def test_parametrized_weights_are_refused_before_anything_changes(kind, function):
    model = nn.Sequential(make(kind), make(kind))
    name = model[1].master_names[0]
    torch.nn.utils.parametrize.register_parametrization(model[1], name, nn.Identity())
    with pytest.raises(ValueError, match=rf"{name} of 1 must be parameters.*remove_parametriz"):
        function(model)
    assert model[0].trainable
    with pytest.raises(ValueError, match="remove_parametrizations"):
        model[1].freeze()
    torch.nn.utils.parametrize.remove_parametrizations(model[1], name)
    function(model)


def test_an_optimizer_moves_no_bias_that_was_frozen():
    model = nn.Sequential(make("linear"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.randn(9, H).bfloat16()).sum().backward()
    freeze(model)
    before = model[0].bias.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].bias, before)


def test_biases_that_become_others_stay_tied():
    model = nn.Sequential(make("linear"), make("linear"), make("linear"))
    for layer in model:
        layer.bias = nn.Parameter(layer.bias.detach().float())
    model[1].bias = model[0].bias
    freeze(model)
    unfreeze(model)
    assert model[0].bias is model[1].bias
    assert model[0].bias is not model[2].bias
    assert model[0].bias.dtype == torch.bfloat16
    assert model[0].weight is not model[1].weight
    assert {name for name, _ in model[0].named_parameters()} == {"weight", "bias"}


def test_a_linear_has_a_dtype_that_trains():
    with pytest.raises(TypeError, match=r"FP8Linear: dtype must be .*got torch\.float64"):
        make("linear", dtype=torch.float64)
