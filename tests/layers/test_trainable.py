"""The two forms of FP8 modules: frozen codes, and master weights that train."""

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts, freeze, unfreeze
from moefp8.adapters import add_lora

H = 32


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
        ({"dtype": torch.float64}, TypeError, "unfreeze: dtype must be bfloat16"),
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
