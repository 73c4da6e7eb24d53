"""`convert` and weights that a model holds itself, which it does not know: they are told."""

import warnings

import pytest
import torch
from torch import nn

from moefp8 import FP8Linear, TopKRouter, convert
from moefp8.layers import plan_conversion
from tests.layers.conversion.hand_written import E, H, I, Model, convert_with_warning
from tests.layers.conversion.plain_experts import DbrxLike, PlainExperts


class Stacks(nn.Module):
    """A block that holds its experts' weights itself."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(E, I, H)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(E, H, I))


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.w1, self.w3 = (nn.ParameterList(torch.randn(I, H) for _ in range(E)) for _ in range(2))
        self.w2 = nn.ParameterList(torch.randn(H, I) for _ in range(E))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Stacks, "2 layers.*.moe.w1 (Stacks, [4, 40, 64])"),
        (Lists, "8 layers.*.moe.w1.* (ParameterList, [40, 64])"),
    ],
)
def test_matrices_that_a_block_holds_itself_are_told(kind, what):
    model = Model(kind)
    plan = plan_conversion(model)
    share = 3 * E * I * H / (3 * E * I * H + E * H + H * H + H)
    assert plan.loose_share == pytest.approx(share)
    assert f"stays: {what}" in str(plan)
    warning = convert_with_warning(model)
    assert warning.startswith(
        f"convert: {100 * share:.0f} % of the weights besides embeddings stay"
    )
    assert what in warning
    assert "GroupedExperts.from_weights" in warning
    assert isinstance(model.layers[0]["proj"], FP8Linear)


def test_they_are_told_where_nothing_becomes_fp8():
    warning = convert_with_warning(nn.ModuleDict({"moe": Stacks()}))
    assert "nothing becomes FP8: 1 moe.gate" in warning
    assert "[4, 40, 64]" in warning


@pytest.mark.parametrize(
    "arguments",
    [
        {"skip": "moe"},
        {"only": "proj"},
        {"filter_fn": lambda module, name: "proj" in name},
        {"overrides": {"moe": False}},
    ],
)
def test_they_are_not_told_where_arguments_leave_them(arguments):
    model = Model(Stacks)
    assert not plan_conversion(model, **arguments).loose
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model, **arguments)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.pos_embed = nn.Linear(H, H), nn.Parameter(torch.randn(1, 500, H))


@pytest.mark.parametrize(
    "module",
    [
        PlainExperts(),
        DbrxLike(),
        TopKRouter(H, E, 2),
        nn.Conv1d(H, H, 3),
        nn.LSTM(H, H),
        nn.MultiheadAttention(H, 2),
        type("Scaled", (nn.Embedding,), {})(100, H),
        Positions(),
    ],
)
def test_weights_of_known_modules_are_not_loose(module):
    assert not plan_conversion(nn.ModuleDict({"proj": nn.Linear(8, 8), "a": module})).loose


def test_few_matrices_are_not_told():
    model = nn.ModuleDict({"proj": nn.Linear(H, H), "moe": Stacks()})
    assert plan_conversion(model).loose
    model["more"] = nn.Linear(1000, H)
    assert not plan_conversion(model).loose
