"""A rank of a sharded model takes whole tensors, and keeps what it would keep of the whole."""

import pytest
import torch
from torch import nn

import moefp8
from tests.checkpoint.cases import E, H, I, Tiny, deepseek_tensors, spoiled
from tests.checkpoint.load.test_sharded import PLANS
from tests.checkpoint.update.cases import (
    EXPERTS,
    assert_same_model,
    buckets,
    loaded,
    quantized,
    stacked,
    trainer_tensors,
    update,
)

BOTH = {"*.experts": "experts"}, {"*.experts": "intermediate"}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("form", [dict, stacked])
def test_a_rank_keeps_what_it_would_keep_of_the_whole(tmp_path, plan, form):
    weights, codes = trainer_tensors(), deepseek_tensors(1)
    for rank, num_ranks in ((1, 2), (1, 3), (2, 3)):
        for tensors, whole in (
            (weights, quantized(tmp_path, weights)),
            (codes, loaded(tmp_path, codes, Tiny(1))),
        ):
            model = moefp8.shard(Tiny(1), plan, rank, num_ranks)
            update(model, *buckets(form(tensors), 3))
            assert_same_model(model, moefp8.shard(whole, plan, rank, num_ranks))


@pytest.mark.parametrize("form", [dict, stacked])
def test_a_rank_of_two_plans(tmp_path, form):
    tensors = trainer_tensors()
    model, whole = Tiny(1), quantized(tmp_path, tensors)
    for plan in BOTH:
        moefp8.shard(model, plan, 1, 2)
        moefp8.shard(whole, plan, 1, 2)
    update(model, *buckets(form(tensors), 2))
    assert_same_model(model, whole)


@pytest.mark.parametrize("plan", [*BOTH, PLANS["linears"]])
def test_a_rank_of_master_weights(tmp_path, plan):
    for tensors in (trainer_tensors(), deepseek_tensors(1)):
        whole = loaded(tmp_path, tensors, moefp8.unfreeze(Tiny(1)))
        model = moefp8.shard(moefp8.unfreeze(Tiny(1)), plan, 1, 3)
        update(model, *buckets(tensors, 2))
        wanted = moefp8.shard(whole, plan, 1, 3).state_dict()
        for name, x in model.state_dict().items():
            torch.testing.assert_close(x, wanted[name], rtol=0, atol=0, equal_nan=True)


def test_experts_of_other_ranks_are_passed_over_but_checked():
    model = spoiled(moefp8.shard(Tiny(1), BOTH[0], 0, E))
    others = {
        f"{EXPERTS}.{expert}.{name}_proj.weight": torch.zeros(shape, dtype=torch.bfloat16)
        for expert in range(1, E)
        for name, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I)))
    }
    before = {name: x.clone() for name, x in model.state_dict().items()}
    update(model, others)
    for name, x in model.state_dict().items():
        assert torch.equal(x.view(torch.uint8), before[name].view(torch.uint8))
    with pytest.raises(ValueError, match=rf"{EXPERTS}\.1\.gate_proj\.weight: shape must be"):
        update(model, {f"{EXPERTS}.1.gate_proj.weight": torch.zeros(3)})
    own = {name.replace(".1.", ".0."): x for name, x in others.items() if ".1." in name}
    update(model, own)  # all of this rank's
    with pytest.raises(ValueError, match=rf"ended, but {EXPERTS}\.0\.up_proj\.weight did not come"):
        update(model, {name: x for name, x in own.items() if "up_proj" not in name})


def test_a_bias_of_another_rank_is_passed_over():
    linears = [moefp8.FP8Linear(256, 8) for _ in range(2)]
    model = nn.ModuleDict({"linear": linears[0]})
    moefp8.shard(model, {"linear": "columns"}, 1, 2)
    whole = torch.randn(8, 256).bfloat16()
    update(model, {"linear.weight": whole, "linear.bias": torch.zeros(8)})
    assert model["linear"].bias is None
