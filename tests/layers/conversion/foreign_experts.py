"""Experts of others that do not compute as ours do, and how `convert` refuses them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moefp8 import convert
from tests.layers.conversion.plain_experts import PlainExperts as Experts

E, H, I = 4, 64, 40
DTYPES = torch.float32, torch.bfloat16, torch.float16
OFF = r"up to \d+ % off"


def with_activation(activate) -> type[Experts]:
    return type("Own", (Experts,), {"activate": lambda self, *halves: activate(*halves)})


def with_forward(forward) -> type[Experts]:
    run = Experts.forward
    return type("Own", (Experts,), {"forward": lambda self, *x: forward(partial(run, self), *x)})


def ranks(ids):
    """Which token of its expert each choice is, from 1 on."""
    num_experts = int(ids.max()) + 1
    return F.one_hot(ids, num_experts).sum(1).cumsum(0).gather(1, ids)


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"proj": nn.Linear(H, H), "experts": make()}) for _ in range(3)
        )


def assert_refused(kind: type[Experts], rule: str, dtype: torch.dtype) -> None:
    """`convert` says why and names the way out, changes nothing, and obeys `skip`."""
    model = Model(kind).to(dtype)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=rule) as caught:
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
