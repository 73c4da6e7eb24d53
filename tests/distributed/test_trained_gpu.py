"""FSDP2 of trained FP8 modules on GPUs, with NCCL."""

import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moefp8
from tests.distributed.trained_cases import Trained, batch, weights_of
from tests.gpu import NEEDS_GPU, NEEDS_TWO_GPUS

pytestmark = [*NEEDS_GPU, pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")]
STEPS = 3


def sharded(num_ranks: int, gathers_codes: bool, **options: Any) -> nn.Module:
    model: Any = Trained(device="cuda")
    if gathers_codes:
        moefp8.prepare_fsdp(model)
    mesh = init_device_mesh("cuda", (num_ranks,))
    for part in (model.first, model.moe, model.last):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model: nn.Module, ranks: Any) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS):
        outputs = [model(batch(rank, step).cuda()) for rank in ranks]
        torch.stack([(y - 1).square().mean() for y in outputs]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert [name for name, x in ours.items() if not torch.equal(x, theirs[name])] == []


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("gathers_codes", [False, True])
@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.usefixtures("one_rank")
def test_one_rank_trains_as_without_fsdp(gathers_codes, reshards):
    """It gathers from nobody, and quantizes what it has."""
    model = sharded(1, gathers_codes, reshard_after_forward=reshards)
    expected = weights_of(train(Trained(device="cuda"), [0]))
    assert_same(weights_of(train(model, [0])), expected)


@pytest.mark.usefixtures("one_rank")
def test_codes_are_freed_with_what_was_gathered():
    model = train(sharded(1, False), [0])

    def allocated() -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    before = allocated()
    model.first.unshard()
    model.first(batch(0).cuda())
    model.first.unshard()
    assert allocated() > before
    model.first.reshard()
    assert allocated() == before


def compare(rank: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl", store, world_size=2, rank=rank)
    results: dict[str, Any] = {"alone": weights_of(train(Trained(device="cuda"), range(2)))}
    for name, make in {
        "plain": partial(sharded, 2, False),
        "codes": partial(sharded, 2, True),
        "codes, kept": partial(sharded, 2, True, reshard_after_forward=False),
    }.items():
        results[name] = weights_of(train(make(), [rank]))
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    os._exit(0)


@NEEDS_TWO_GPUS
def test_two_ranks_train_as_one_process(tmp_path):
    torch.multiprocessing.spawn(compare, (tmp_path,), nprocs=2)
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt", map_location="cpu", weights_only=True)
        for name in ("plain", "codes", "codes, kept"):
            assert_same(results[name], results["alone"])
