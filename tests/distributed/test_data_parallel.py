"""DDP and FSDP of models with frozen FP8 modules: two ranks come to what one process comes to."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moefp8
from moefp8 import FP8Linear
from tests.distributed.data_parallel_cases import RANKS, Tuned, run_cases
from tests.distributed.ranks import run_processes

EXACT = (
    "ddp",
    "ddp, other seeds",
    "ddp, checkpointed",
    "fsdp1",
    "fsdp2",
    "fsdp2, checkpointed",
    "fsdp2, ignored",
)
SHARDED = "fsdp2", "fsdp2, checkpointed"
IN_BF16 = "fsdp2, bf16, ignored", "fsdp2, bf16, each"  # a policy of BF16 leaves FP8 alone

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    """What each case gave, for each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    run_processes(run_cases, (folder,), RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_training_changes_something(results):
    alone = results[0]["alone"]
    for name, after in alone["trained"].items():
        assert (after - alone["before"][name]).abs().max() > 5e-4


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("case", EXACT + IN_BF16)
def test_two_ranks_train_as_one_process(results, case, rank):
    came, alone = results[rank][case], results[rank]["alone"]
    of_output, of_trained = (0.1, 2e-4) if case in IN_BF16 else (0, 0)
    torch.testing.assert_close(came["output"], alone["outputs"][rank], rtol=0, atol=of_output)
    torch.testing.assert_close(came["trained"], alone["trained"], rtol=0, atol=of_trained)


WHOLE = (
    "ddp, whole",
    "ddp, whole, other seeds",
    "fsdp1, whole",
    "fsdp2, whole",
    "fsdp2, whole, checkpointed",
)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("case", WHOLE)
def test_two_ranks_train_master_weights_as_one_process(results, case, rank):
    """Gradients are summed in FP32, and codes are those of each step's weights."""
    came, alone = results[rank][case], results[rank]["whole, alone"]
    torch.testing.assert_close(came["output"], alone["outputs"][rank], rtol=0, atol=0)
    assert {"moe.experts.down_proj", "linear.weight", "linear.bias"} <= alone["trained"].keys()
    torch.testing.assert_close(came["trained"], alone["trained"], rtol=0, atol=0)
    moved = {name: (x - alone["before"][name]).abs().max() for name, x in came["trained"].items()}
    assert min(moved.values()) > 1e-6


@pytest.mark.parametrize("case", EXACT)
def test_training_leaves_codes_as_they_are(results, case):
    sums = [results[rank][case]["sum_of_codes"] for rank in range(RANKS)]
    whole = results[0]["alone"]["sum_of_codes"]
    assert sums == [whole] * RANKS or (case in SHARDED and sum(sums) == whole)


def test_without_being_told_a_policy_of_bf16_is_an_error(results):
    error = results[0]["fsdp2, bf16"]  # FSDP tells it, or the layer that gets BF16
    assert "same dtype" in error or re.search("must be float(8_e4m3fn|32), got bfloat16", error)


@pytest.mark.parametrize("rank", range(RANKS))
def test_inference(results, rank):
    outputs = results[rank]["alone"]["outputs"]
    assert torch.equal(results[rank]["ddp, inference"]["output"], outputs[rank])


def test_fully_shard_holds_a_share_of_the_codes(results):
    whole = results[0]["fsdp2, ignored"]["num_codes"]
    for case in (*SHARDED, "fsdp2, bf16, each"):
        shares = [results[rank][case]["num_codes"] for rank in range(RANKS)]
        assert sum(shares) == whole
        assert max(shares) < 0.7 * whole


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("other experts", "moe.gate.weight is torch.float32 [2, 136] on cpu on rank 0"),
        ("sharded", "moe.experts.gate_up_proj is torch.float8_e4m3fn [2, 144, 136] on cpu, [0, 2)"),
        ("sharded", "on rank 1; of models cut by shard, pass the group of ranks with the same"),
        ("meta", "on the meta device; load or initialise it first"),
    ],
)
def test_ranks_that_differ_are_refused_by_all(results, case, told, rank):
    assert results[rank][case].startswith("ValueError: prepare_ddp: ")
    assert told in results[rank][case]


def test_frozen_parameters_are_those_of_fp8_modules_that_ask_for_no_gradient():
    model = Tuned()
    named = dict(model.named_parameters())
    frozen = moefp8.frozen_parameters(model)
    assert all(named[name] is parameter for name, parameter in frozen.items())
    rest = "embedding.weight", "adapter.weight", "adapter.bias", "head.weight", "head.bias"
    assert named.keys() - frozen.keys() == {*rest}
    model.moe.gate.requires_grad_(True)
    assert "moe.gate.weight" not in moefp8.frozen_parameters(model)
    assert set(moefp8.frozen_parameters(model.linear)) == {"weight", "weight_scale_inv", "bias"}


def test_tied_modules_are_named_twice():
    fp8 = FP8Linear(8, 8, bias=False)
    names = {*moefp8.frozen_parameters(nn.ModuleDict({"a": fp8, "b": fp8}))}
    assert names == {"a.weight", "a.weight_scale_inv", "b.weight", "b.weight_scale_inv"}


def test_codes_that_were_cast_are_refused():
    """A policy of BF16 casts codes and scales, unless it is told to leave them."""
    for leaf in ("weight", "weight_scale_inv"):
        fp8 = FP8Linear(256, 128)
        fp8._parameters[leaf] = nn.Parameter(getattr(fp8, leaf).bfloat16(), requires_grad=False)
        with pytest.raises(TypeError, match=rf"{leaf}|scale_inv"):
            fp8(torch.ones(1, 256))
