"""Whole models with experts on two ranks: loading, saving, and what is refused."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moefp8
from tests.distributed.expert_parallel import model_cases as cases
from tests.distributed.expert_parallel.cases import sum_of
from tests.distributed.expert_parallel.model_cases import RANKS, E, Model, batch, whole
from tests.distributed.ranks import Ranks, ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def group(tmp_path_factory) -> Iterator[Ranks]:
    with ranks(RANKS, tmp_path_factory.mktemp("ranks")) as made:
        yield made


def run(group: Ranks, function: Any, *arguments: Any) -> list[Any]:
    came = group.run(function, [(rank, *arguments) for rank in range(RANKS)])
    for each in came:
        assert not isinstance(each, str), each
    return came


class Parts(torch.nn.Module):
    """The experts of all ranks in one process: FP32 sums, in their order, of what parts give."""

    def __init__(self, experts: moefp8.GroupedExperts) -> None:
        super().__init__()
        twins = [copy.deepcopy(experts) for _ in range(RANKS)]
        self.parts = torch.nn.ModuleList(
            moefp8.shard(x, {"": "experts"}, rank, RANKS) for rank, x in enumerate(twins)
        )

    def forward(self, x: torch.Tensor, *choices: torch.Tensor) -> torch.Tensor:
        return sum_of([part(x, *choices).bfloat16().float() for part in self.parts]).bfloat16()


def in_parts(model: Any) -> Any:
    for layer in getattr(model, "layers", [model]):
        layer.experts = Parts(layer.experts)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    moefp8.save_checkpoint(whole(), path)
    return path


def num_bytes(model: Model, of_experts: bool) -> int:
    tensors = model.state_dict().items()
    return sum(x.nbytes for name, x in tensors if (".experts." in name) == of_experts)


def test_a_rank_reads_its_own_experts_and_no_others(group, saved):
    model = whole()
    expert_bytes, other_bytes = (num_bytes(model, x) for x in (True, False))
    model = in_parts(model)
    for rank, (read, state, y) in enumerate(run(group, cases.loaded, saved, None)):
        begin, end = rank * E // RANKS, (rank + 1) * E // RANKS
        assert read == other_bytes + (end - begin) * expert_bytes // E
        for name, x in whole().state_dict().items():
            wanted = x[begin:end] if ".experts." in name else x
            assert torch.equal(state[name].view(torch.uint8), wanted.view(torch.uint8)), name
        with torch.no_grad():
            assert torch.equal(y, model(batch(rank)))


def test_adapters_of_a_whole_model_are_loaded(group, saved, tmp_path):
    model = whole()
    moefp8.adapters.add_lora(model, rank=2, targets=["experts"])
    for x in model.parameters():
        if x.requires_grad:
            x.data.normal_(std=0.1)
    moefp8.adapters.save_lora(model, tmp_path)
    with torch.no_grad():
        wanted = [model(batch(rank)) for rank in range(RANKS)]
    plain = [y for _, _, y in run(group, cases.loaded, saved, None)]
    adapted = [y for _, _, y in run(group, cases.loaded, saved, tmp_path)]
    for x, y, z in zip(plain, adapted, wanted, strict=True):
        assert moefp8.testing.relative_error(y.float(), z.float()) < 0.05
        assert moefp8.testing.relative_error(x.float(), z.float()) > 0.2


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_moe_adds_its_shared_experts_as_one_process_does(group, dtype):
    """Each rank has gradients of its own tokens in what all hold."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"shared_intermediate_size": 40, "shared_expert_gate": True}
    moe = in_parts(moefp8.MoE(cases.H, cases.I, E, 2, **options))
    for rank, (y, dx, of_gate) in enumerate(run(group, cases.of_a_moe, dtype)):
        x = batch(rank, dtype).requires_grad_()
        moe.zero_grad()
        wanted = moe(x)
        wanted.backward(cases.grad_of(rank, dtype))
        assert torch.equal(y, wanted)
        assert torch.equal(of_gate, moe.shared_expert_gate.weight.grad)
        torch.testing.assert_close(dx, x.grad, rtol=0.02, atol=1e-3)


def test_what_a_part_refuses(group, tmp_path):
    for found in run(group, cases.refused, tmp_path):
        assert "hold one rank's part alone (layers.0.experts, ...)" in found["save"]
        assert "before shard or expert_parallel, or keep the state_dict()" in found["save"]
        assert "is one rank's part; keep the state_dict() of every rank" in found["save_lora"]
        for name in ("freeze", "unfreeze"):
            assert "layers.0.experts is one rank's part of a layer that shard has" in found[name]
        assert "dequantize: layers.0.experts has experts on other ranks" in found["dequantize"]
        assert "layers.0.experts has experts on other ranks" in found["dequantize, trained"]
        assert "the module has experts on other ranks" in found["to_plain"]
        assert "is cut along axis 0 already" in found["shard"]
        assert "the model must be whole" in found["reference"]
        assert "all ranks must hold the same" in found["prepare_ddp"]
        assert "are those of a group already" in found["again"]
        assert not found["changed"]
        assert found["convert"]
        assert found["is parallel"]
    assert list(tmp_path.iterdir()) == []


def test_states_of_all_ranks_are_that_of_the_model(group):
    """Those of experts lie one behind the other."""
    model = whole(1)
    each = run(group, cases.states)
    merged = {
        name: torch.cat([x[name] for x in each]) if ".experts." in name else tensor
        for name, tensor in each[0].items()
    }
    model.load_state_dict(merged)
    with torch.no_grad():
        assert torch.equal(model(batch(0)), whole()(batch(0)))


def test_convert_may_come_later(group):
    model = in_parts(whole())
    for rank, (name, y) in enumerate(run(group, cases.changed_later)):
        assert name == "FP8Linear"
        with torch.no_grad():
            assert torch.equal(y, model(batch(rank)))


def test_kernels_of_a_part_are_compiled_ahead(group):
    for few, many in run(group, cases.num_kernels):
        assert 0 < few <= many
