"""`convert`, `plan_conversion`, `dequantize`, `freeze`, `unfreeze`: whole models, and back."""

import copy
import io
import logging
import warnings
from typing import Any

import torch
from torch import nn

import moefp8
from moefp8.layers import Conversion, PlainExperts, plan_conversion, set_batch_invariant

from . import BF16, attempt, case, randn


class Block(nn.Module):
    """A router, experts and a linear, as models of transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(136, 136, bias=False)
        self.gate = nn.Linear(136, 4, bias=False)
        self.experts = PlainExperts(4, 136, 72)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.q_proj(x)
        scores, ids = self.gate(x).float().softmax(dim=-1).topk(2)
        return x + self.experts(x, ids, scores)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(136, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(136, 72, bias=False) for _ in range(2))
        self.w2 = nn.Linear(72, 136, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Looping(nn.Module):
    """A router, and experts in a list that are called one by one."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(136, 4, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids = self.gate(x).float().softmax(dim=-1).topk(2)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, choice = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token]) * scores[token, choice, None].to(x.dtype))
        return self.factor * y


class Renamed(nn.Module):
    """Stacks under the names that vLLM has."""

    def __init__(self, device: str) -> None:
        super().__init__()
        plain = PlainExperts(4, 136, 72, device=device)
        self.w13, self.w2 = plain.gate_up_proj, plain.down_proj

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        plain = PlainExperts(4, 136, 72, device="meta")
        plain.gate_up_proj, plain.down_proj = self.w13, self.w2
        return PlainExperts.forward(plain, x, ids, scores)


def _model(device: str) -> Model:
    return Model().to(device, BF16)


@case
def whole_model(device: str) -> Any:
    x, model = randn(9, 136, device=device), _model(device)
    before = model(x)
    return before, moefp8.convert(model), model(x)


@case
def chosen_parts(device: str) -> Any:
    x, whole = randn(9, 136, device=device), _model(device)
    models = [copy.deepcopy(whole) for _ in range(5)]
    outcomes = [
        moefp8.convert(models[0], skip="experts", only=["*layers.0.*", "layers.1"]),
        moefp8.convert(models[1], filter_fn=lambda module, name: "lm_head" in name),
        moefp8.convert(
            model=models[2],
            overrides={"lm_head": True, "*q_proj": False, "*experts": {"layout": "masked"}},
            return_conversion=True,
            progress=False,
        ),
        moefp8.convert(models[3], trainable=True, wgrad="128x128", return_conversion=True),
        moefp8.convert(models[4], overrides={"*q_proj": {"trainable": True, "wgrad": "bf16"}}),
    ]
    return outcomes, [model(x) for model in models]


@case
def experts_in_a_list(device: str) -> Any:
    x, model = randn(9, 136, device=device), nn.ModuleList([Looping(), Looping()]).to(device, BF16)
    model[1].factor = 1.1
    before = [block(x) for block in model]
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        _, conversion = moefp8.convert(model, return_conversion=True)
    after = [block(x) for block in model]
    return before, after, model, conversion, [str(x.message) for x in raised]


@case
def stacks_called_w13_and_w2(device: str) -> Any:
    ids = torch.arange(18, device=device).view(9, 2) % 4
    inputs = randn(9, 136, device=device), ids, randn(9, 2, device=device)
    experts = Renamed(device)
    return experts(*inputs), moefp8.convert(experts)(*inputs)


@case
def one_linear(device: str) -> Any:
    return moefp8.convert(nn.Linear(64, 48).to(device, BF16)), moefp8.convert(
        nn.Sequential(nn.Linear(64, 48)).to(device), skip=None, only=None
    )


@case
def on_the_meta_device(device: str) -> Any:
    with torch.device("meta"):
        model = Model()
    return moefp8.convert(model, only="experts")


@case
def planned(device: str) -> Any:
    model = _model(device)
    plans = [
        plan_conversion(model),
        plan_conversion(
            model=model,
            skip=("layers.0",),
            only="layers",
            filter_fn=lambda module, name: "proj" in name,
            overrides={"*.1.q_proj": False},
            trainable=True,
            wgrad="bf16",
        ),
        plan_conversion(nn.Sequential(nn.GELU())),
        Conversion(swapped={"a.0": "linear"}, kept={"b": "why"}, experts=("b",), trainable=["a.0"]),
        Conversion(swapped={"a.0.w1": "linear"}, one_by_one={"a": "(Block): why"}),
        Conversion(swapped={"a": "linear"}, loose={"w": "Block, [4, 8, 8]"}, loose_share=0.9),
    ]
    return [(plan, str(plan), plan.warning()) for plan in plans], moefp8.layers.DEFAULT_SKIP


@case
def what_is_said(device: str) -> Any:
    """The log and warnings of conversions, and the bar."""
    stream, logger = io.StringIO(), logging.getLogger("moefp8")
    handler, level = logging.StreamHandler(stream), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            moefp8.convert(_model(device))
            moefp8.convert(nn.Sequential(nn.GELU()))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return stream.getvalue(), [str(x.message) for x in raised]


@case
def and_back(device: str) -> Any:
    x, model = randn(9, 136, device=device), moefp8.convert(_model(device))
    other = copy.deepcopy(model)
    plain = moefp8.dequantize(model=model), moefp8.dequantize(other, dtype=torch.float32).float()
    again = moefp8.convert(copy.deepcopy(plain[0]))
    return plain, plain[0](x), plain[1](x.float()), again


@case
def masters(device: str) -> Any:
    model = moefp8.convert(_model(device))
    trained = copy.deepcopy(moefp8.unfreeze(model))
    other = moefp8.unfreeze(model=moefp8.freeze(model), dtype=torch.float32, wgrad="128x128")
    return trained, copy.deepcopy(other), moefp8.freeze(model=other), other is model


@case
def batch_invariant(device: str) -> Any:
    model, x = moefp8.convert(_model(device)), randn(5, 136, device=device)
    once = moefp8.set_batch_invariant(model)(x)
    set_batch_invariant(model=model, enabled=False)
    return once, set_batch_invariant(model, enabled=True) is model


@case
def tied_weights_and_conv1d(device: str) -> Any:
    from transformers.pytorch_utils import Conv1D

    linear = nn.Linear(64, 64)
    model = nn.Sequential(linear, nn.Linear(64, 64), Conv1D(32, 64)).to(device, BF16)
    model[1].weight = linear.weight
    x = randn(5, 64, device=device)
    moefp8.convert(model)
    return model, model(x), model[0].weight is model[1].weight


@case
def errors(device: str) -> Any:
    model = _model(device)
    hooked = nn.Sequential(nn.Linear(8, 8)).to(device)
    hooked[0].register_forward_hook(lambda module, inputs, output: None)
    return [
        attempt(lambda: moefp8.convert(model, skip="no_such_name")),
        attempt(lambda: moefp8.convert(model, only=[3])),
        attempt(lambda: moefp8.convert(model, overrides={"*.experts": {"size": 3}})),
        attempt(lambda: moefp8.convert(model, wgrad="128x2")),
        attempt(lambda: moefp8.convert(hooked)),
        attempt(lambda: moefp8.convert(nn.Sequential(nn.Linear(8, 8).double()))),
        attempt(lambda: moefp8.unfreeze(moefp8.FP8Linear(8, 8), torch.int32)),
        attempt(lambda: moefp8.dequantize(moefp8.FP8Linear(8, 8), torch.float8_e4m3fn)),
    ]
