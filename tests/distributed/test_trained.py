"""DDP and FSDP of trained FP8 modules: two ranks come to what one process comes to."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moefp8
from moefp8 import FP8Linear
from moefp8.checkpoint import CheckpointError
from tests.distributed.ranks import run_processes
from tests.distributed.trained_cases import (
    EXACT,
    RANKS,
    Trained,
    batch,
    loss_of,
    run_cases,
    train,
    weights_of,
)

IN_CODES = (  # those whose shards hold whole blocks
    "first.weight",
    "moe.experts.gate_up_proj",
    "moe.experts.down_proj",
    "moe.shared_experts.down_proj.weight",
)
NUM_IN_CODES, NUM_OTHERS = len(IN_CODES), 3

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    """What each case gave, for each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    run_processes(run_cases, (folder,), RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def assert_close(came: Any, wanted: Any, atol: float = 0) -> None:
    torch.testing.assert_close(came, wanted, rtol=0, atol=atol)


@pytest.mark.slow
@needs_gloo
def test_training_changes_all_weights(results):
    before = weights_of(Trained())
    for name, after in results[0]["alone"].items():
        assert (after - before[name]).abs().max() > 1e-5, name


@needs_gloo
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("case", EXACT)
def test_two_ranks_train_as_one_process(results, case, rank):
    assert_close(results[rank][case], results[rank]["alone"])


@needs_gloo
@pytest.mark.parametrize("case", ["accumulated", "accumulated, codes"])
def test_gradients_of_micro_batches_are_summed(results, case):
    assert_close(results[0][case], results[0]["accumulated, alone"], 1e-8)
    assert_close(results[1][case], results[0][case])


@needs_gloo
@pytest.mark.parametrize(
    "case", ["adamw", "adamw, codes", "adamw, codes, fused", "adamw, codes, one by one"]
)
def test_gradients_are_clipped_and_adamw_steps_with_shards(results, case):
    assert_close(results[0][case], results[0]["adamw, alone"], 1e-7)


@needs_gloo
def test_uneven_shards_are_gathered_as_they_are(results):
    """Three experts on two ranks."""
    assert_close(results[0]["uneven, codes"], results[0]["uneven"])
    assert_close(results[1]["uneven, codes"], results[0]["uneven"])


@needs_gloo
def test_a_model_may_be_sharded_on_the_meta_device(results):
    weights, num_bytes = results[0]["from meta"]
    assert_close(weights, results[0]["alone"])
    assert num_bytes == results[0]["counts, codes"]["bytes"]


@needs_gloo
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("case", ["saved", "saved, then plain"])
def test_sharded_weights_and_optimizer_states_are_saved_and_loaded(results, case, rank):
    """Files hold values: with or without codes that are gathered, they are the same."""
    assert_close(*results[rank][case])


@needs_gloo
def test_codes_are_made_once_for_each_time_that_weights_are_gathered(results):
    """The first linear gives no gradient of its inputs, and needs no codes in a backward."""
    found = results[0]["counts"]
    assert found["quantize_128x128_both_into"] == 2 * (NUM_IN_CODES + NUM_OTHERS) - 1
    assert found["quantize_128x128"] == found["transpose_codes_into"] == 0


@needs_gloo
@pytest.mark.parametrize(("case", "times"), [("counts, codes", 2), ("counts, codes, kept", 1)])
def test_shards_are_quantized_before_they_are_gathered(results, case, times):
    found = results[0][case]
    assert found["quantize_128x128"] == times * NUM_IN_CODES
    assert found["transpose_codes_into"] == NUM_IN_CODES - 1
    assert found["quantize_128x128_both_into"] == times * NUM_OTHERS


@needs_gloo
@pytest.mark.parametrize(("kind", "times"), [("", 2), (", kept", 1)])
def test_a_gathered_weight_is_a_byte_and_its_scales(results, kind, times):
    whole = results[0]["alone"]
    num_values = sum(whole[name].numel() for name in IN_CODES)
    values, codes = (results[0][f"{case}{kind}"]["bytes"] for case in ("counts", "counts, codes"))
    of_scales = codes - (values - times * 3 * num_values)
    assert 0 < of_scales < times * num_values / 500


@needs_gloo
@pytest.mark.parametrize(("case", "most"), [("bf16", 0.12), ("bf16, codes", 0.09)])
def test_a_policy_of_bf16_is_for_what_is_gathered(results, case, most):
    """Shards' gradients stay FP32. With codes, FP32 is rounded but once."""
    found, alone = results[0][case], results[0]["gradients, alone"]
    assert found["dtypes"] == ["torch.float32"]
    for name, x in found["gradients"].items():
        assert (x - alone[name]).norm() < most * alone[name].norm(), name


@needs_gloo
def test_a_gathered_weight_has_no_values(results):
    error = results[0]["reads values"]
    assert error.startswith("TypeError: aten.linalg_vector_norm.default: FSDP gathered FP8 codes")
    assert "leave out prepare_fsdp" in error


@needs_gloo
def test_weights_are_prepared_before_they_are_sharded(results):
    error = results[0]["too late"]
    assert error.startswith("ValueError: prepare_fsdp: weight of a FP8Linear is a DTensor")


# ---- One process ----


def test_a_prepared_model_that_is_not_sharded_trains_as_before():
    model = moefp8.prepare_fsdp(Trained())
    assert_close(weights_of(train(model, range(RANKS))), weights_of(train(Trained(), range(RANKS))))


def test_a_prepared_model_is_copied_cast_and_pickled():
    model = moefp8.prepare_fsdp(Trained())
    with torch.no_grad():
        want = model(batch(0))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Trained(1)
    other.load_state_dict(torch.load(file, weights_only=True))
    loaded = moefp8.prepare_fsdp(Trained(1))
    loaded.load_state_dict(model.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other, loaded):
        assert torch.equal(twin(batch(0)), want)
        loss_of(twin, [0]).backward()
        assert all(x.requires_grad and x.grad is not None for x in twin.parameters())
    model.bfloat16()
    assert model.first.weight.dtype == torch.bfloat16
    assert model(batch(0).bfloat16()).dtype == torch.bfloat16


def test_a_prepared_model_is_no_checkpoint(tmp_path):
    model = moefp8.prepare_fsdp(nn.Sequential(FP8Linear(8, 16, trainable=True)))
    with pytest.raises(CheckpointError, match=r"0\.weight: a ShardedWeight .*; save before"):
        moefp8.save_checkpoint(model, tmp_path / "saved")
    moefp8.save_checkpoint(nn.Sequential(FP8Linear(8, 16)), tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"0\.weight: a ShardedWeight .*; load before"):
        moefp8.load_checkpoint(model, tmp_path / "saved")


def test_tied_weights_stay_tied():
    first, second = (FP8Linear(128, 128, bias=False, trainable=True) for _ in range(2))
    second.weight = first.weight
    model = moefp8.prepare_fsdp(nn.Sequential(first, second))
    assert first.weight is second.weight
    assert len(list(model.parameters())) == 1


def test_weights_that_are_tied_to_others_are_left_alone():
    embedding, head = nn.Embedding(128, 128), FP8Linear(128, 128, bias=False, trainable=True)
    head.weight = embedding.weight
    model = moefp8.prepare_fsdp(nn.ModuleList([embedding, head, FP8Linear(8, 8, trainable=True)]))
    assert head.weight is embedding.weight
    assert type(head.weight) is nn.Parameter
    assert type(model[2].weight) is not nn.Parameter


def test_attributes_of_weights_stay():
    layer = FP8Linear(128, 128, trainable=True)
    layer.weight.main_grad = main_grad = torch.zeros(128, 128)
    assert moefp8.prepare_fsdp(layer).weight.main_grad is main_grad


def test_frozen_weights_are_left_alone():
    model = nn.Sequential(FP8Linear(128, 128), nn.Linear(128, 128))
    before = dict(model.named_parameters())
    moefp8.prepare_fsdp(model)
    assert all(x is before[name] for name, x in model.named_parameters())


@pytest.mark.parametrize("make", [torch.empty_like, torch.zeros_like, torch.ones_like])
def test_what_is_made_like_a_prepared_weight_has_its_dtype(make):
    weight = moefp8.prepare_fsdp(FP8Linear(8, 16, trainable=True)).weight
    assert (make(weight).dtype, make(weight).shape) == (torch.bfloat16, (16, 8))
