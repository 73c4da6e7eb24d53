"""What a newcomer gets wrong with layers: errors name what is wrong and the way out."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts, MoE, TopKRouter
from moefp8.layers import PlainExperts

E, H, I = 3, 160, 96
NAN = math.nan


def stacks(*turned: str) -> dict[str, torch.Tensor]:
    """gate_up_proj [E, 2I, H] and down_proj [E, H, I], of which some are transposed."""
    weights = {"gate_up_proj": torch.randn(E, 2 * I, H), "down_proj": torch.randn(E, H, I)}
    return {name: x.transpose(1, 2) if name in turned else x for name, x in weights.items()}


# Stacks of experts


@pytest.mark.parametrize(
    "turned", [("down_proj",), ("gate_up_proj",), ("gate_up_proj", "down_proj")]
)
def test_a_transposed_stack_is_named_and_the_way_out_works(turned):
    ways = " and ".join(f"{name}.transpose(1, 2)" for name in turned)
    weights = stacks(*turned)
    with pytest.raises(ValueError, match=r"GroupedExperts\.from_weights: gate_up_proj ") as caught:
        GroupedExperts.from_weights(**weights)
    assert str(caught.value).endswith(f", transposed; pass {ways}")
    shapes = f"got {list(weights['gate_up_proj'].shape)} and {list(weights['down_proj'].shape)}"
    assert shapes in str(caught.value)
    fixed = {name: x.transpose(1, 2) if name in turned else x for name, x in weights.items()}
    GroupedExperts.from_weights(**fixed)


def test_stacks_that_fit_neither_way_are_told_their_shapes():
    with pytest.raises(ValueError, match=r"got \[3, 192, 160\] and \[3, 7, 5\]$"):
        GroupedExperts.from_weights(**stacks() | {"down_proj": torch.randn(E, 7, 5)})


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_a_list_of_weights_is_told_torch_stack(name):
    weights = stacks()
    with pytest.raises(TypeError, match=f"{name} must be a tensor, got list; torch.stack makes"):
        GroupedExperts.from_weights(**weights | {name: [*weights[name]]})
    with pytest.raises(TypeError, match=f"{name} must be a tensor, got NoneType$"):
        GroupedExperts.from_weights(**weights | {name: None})


def test_layers_tell_of_lists_too():
    rows = [torch.randn(H), torch.randn(H)]
    with pytest.raises(TypeError, match=r"must be a tensor, got list; torch\.stack"):
        MoE(H, I, E, 2)(rows)


# Numbers


LIMITED: dict[str, Any] = {
    "GroupedExperts": lambda limit: GroupedExperts(E, H, I, swiglu_limit=limit),
    "GroupedExperts of weights": lambda limit: GroupedExperts.from_weights(
        **stacks(), swiglu_limit=limit
    ),
    "MoE": lambda limit: MoE(H, I, E, 2, swiglu_limit=limit),
    "PlainExperts": lambda limit: PlainExperts(E, H, I, swiglu_limit=limit),
    "GroupedExperts by overrides": lambda limit: moefp8.convert(
        nn.ModuleDict({"experts": PlainExperts(E, H, I)}),
        overrides={"experts": {"swiglu_limit": limit}},
    ),
}


@pytest.mark.parametrize("make", LIMITED)
@pytest.mark.parametrize("limit", [-1, -math.inf, NAN])
def test_a_limit_below_0_is_refused_at_once(make, limit):
    name = make.split()[0]
    with pytest.raises(ValueError, match=f"{name}: swiglu_limit must be at least 0, or None, got"):
        LIMITED[make](limit)


@pytest.mark.parametrize("make", LIMITED)
def test_limits_from_0_on_are_taken(make):
    for limit in (None, 0, 7.0, math.inf):
        LIMITED[make](limit)


@pytest.mark.parametrize("factor", [-2.5, 0, math.inf, NAN])
def test_a_router_s_factor_is_finite_and_above_0(factor):
    with pytest.raises(ValueError, match="TopKRouter: scaling_factor must be finite and above 0"):
        TopKRouter(H, E, 2, scoring="sigmoid", scaling_factor=factor)
    with pytest.raises(ValueError, match="scaling_factor must be finite and above 0"):
        MoE(H, I, E, 2, scoring="sigmoid", scaling_factor=factor)


# Dtypes by name


BY_NAME = {
    "unfreeze": lambda dtype: moefp8.unfreeze(FP8Linear(H, H), dtype),
    "dequantize": lambda dtype: moefp8.dequantize(nn.Sequential(FP8Linear(H, H)), dtype),
    "FP8Linear.unfreeze": lambda dtype: FP8Linear(H, H).unfreeze(dtype),
    "FP8Linear.dequantize": lambda dtype: FP8Linear(H, H).dequantize(dtype),
    "GroupedExperts.dequantize": lambda dtype: GroupedExperts(E, H, I).dequantize(dtype),
    "GroupedExperts": lambda dtype: GroupedExperts(E, H, I, trainable=True, dtype=dtype),
    "FP8Linear": lambda dtype: FP8Linear(H, H, trainable=True, dtype=dtype),
    "add_lora": lambda dtype: moefp8.adapters.add_lora(nn.Sequential(FP8Linear(H, H)), dtype=dtype),
    "precompile": lambda dtype: moefp8.precompile(FP8Linear(H, H), 1, dtype=dtype),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_dtype_by_name_is_told_the_dtypes(name):
    rule = r"dtype must be one of torch\.bfloat16, torch\.float16, torch\.float32, got 'float32'"
    with pytest.raises(TypeError, match=f"^{name}: {rule}"):
        BY_NAME[name]("float32")


# Training of frozen weights


def trained(model: nn.Module, **options) -> None:
    """One step of a newcomer's loop."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.randn(4, H)).square().mean().backward()
    optimizer.step()
    optimizer.step()


def test_an_optimizer_of_frozen_weights_warns_once_of_unfreeze():
    model = moefp8.convert(nn.Sequential(nn.Linear(H, H), nn.RMSNorm(H)))
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(model)
        (warning,) = [str(x.message) for x in caught if "FP8 weights" in str(x.message)]
        assert warning.startswith("AdamW holds 1 FP8 weights, whose codes are frozen")
        assert "moefp8.unfreeze(model)" in warning
        assert "trainable=True" in warning


@pytest.mark.filterwarnings("error:.*FP8 weights")
def test_what_trains_is_not_warned_of():
    model = moefp8.convert(nn.Sequential(nn.Linear(H, H), nn.RMSNorm(H)))
    trained(nn.Sequential(nn.Linear(H, H)))
    moefp8.unfreeze(model)
    before = model[0].weight.detach().clone()
    trained(model, lr=0.1)
    assert not torch.equal(model[0].weight, before)


def test_codes_that_are_asked_for_a_gradient_tell_of_unfreeze():
    linear = FP8Linear(H, H)
    linear.weight.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"moefp8\.unfreeze\(model\), or .*trainable=Tr"):
        linear(torch.randn(4, H)).sum().backward()


def test_a_module_tells_in_its_repr_that_it_is_frozen():
    """PyTorch's own error of a loss without a gradient cannot."""
    assert "trainable=False" in repr(FP8Linear(H, H))
    assert "trainable=False" in repr(GroupedExperts(E, H, I))
    assert "trainable=True" in repr(FP8Linear(H, H, trainable=True))
