"""Parts of ranks, data parallel wrappers, and experts that ranks share."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moefp8
from moefp8.distributed import ExpertParallel, expert_parallel

from . import BF16, attempt, case, choices, long_case, randn, seed, step


@contextmanager
def single_group(device: str) -> Iterator[Any]:
    """A default group of this process alone, and its mesh."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,), mesh_dim_names=("experts",))
    finally:
        dist.destroy_process_group()


def _layer(device: str, **options: Any) -> moefp8.MoE:
    return moefp8.MoE(136, 72, 5, 2, shared_intermediate_size=200, device=device, **options)


@case
def parts(device: str) -> Any:
    """What `shard` leaves of each kind, for each of three ranks."""
    x, outcomes = randn(7, 136, device=device), []
    linear = moefp8.FP8Linear(136, 200, device=device)
    ids, scores = choices(7, 2, 5, device)
    for rank in range(3):
        rows = moefp8.shard(copy.deepcopy(linear), {"": "rows"}, rank, 3)
        columns = moefp8.shard(
            model=copy.deepcopy(linear), plan={"": "columns"}, rank=rank, num_ranks=3
        )
        begin, end = rank * 136 // 3, (rank + 1) * 136 // 3
        seed()
        experts = moefp8.shard(_layer(device), {"experts": "experts"}, rank, 3).experts
        seed()
        plan = {"*experts": "intermediate"}
        inner = moefp8.shard(_layer(device), plan, rank, 3)
        numbers = experts.num_experts, experts.expert_offset, experts.num_global_experts
        outputs = rows(x), columns(x[:, begin:end]), experts(x, ids, scores), inner(x)
        outcomes.append((rows, columns, experts, inner, numbers, outputs))
    return outcomes


@case
def parts_with_masters(device: str) -> Any:
    layer = _layer(device, trainable=True)
    moefp8.shard(layer, {"experts": "experts"}, 1, 2)
    return layer, step(layer, randn(7, 136, device=device))


@case
def data_parallel(device: str) -> Any:
    model = nn.Sequential(nn.Linear(136, 136).to(device), _layer(device))
    model[1].requires_grad_(False)
    names = [*moefp8.frozen_parameters(model=model)]
    with single_group(device):
        ddp = DistributedDataParallel(moefp8.prepare_ddp(model=model, process_group=None))
        return names, step(ddp, randn(7, 136, device=device, dtype=torch.float32))


@case
def fully_sharded(device: str) -> Any:
    layers = [
        moefp8.FP8Linear(136, 136, device=device, trainable=True, dtype=torch.float32)
        for _ in range(2)
    ]
    with single_group(device) as mesh:
        model = moefp8.prepare_fsdp(model=nn.Sequential(*layers))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outcomes = []
        for _ in range(2):
            outcomes.append(step(model, randn(9, 136, device=device)))
            optimizer.step()
            optimizer.zero_grad()
        return outcomes, model.state_dict()


@case
def experts_alone(device: str) -> Any:
    outcomes = []
    with single_group(device) as mesh:
        layer = _layer(device, expert_mesh=mesh)
        outcomes.append(step(layer, randn(7, 136, device=device)))
        experts = ExpertParallel(
            experts=moefp8.GroupedExperts(5, 136, 72, device=device),
            mesh=mesh,
            timeout=None,
            transport=None,
        )
        x, (ids, scores) = randn(7, 136, device=device), choices(7, 2, 5, device)
        addend = randn(7, 136, device=device)
        outcomes.append(
            experts(hidden_states=x, top_k_index=ids, top_k_weights=scores, addend=addend)
        )
        model = expert_parallel(
            model=nn.Sequential(_layer(device, trainable=True)),
            mesh=mesh,
            timeout=timedelta(minutes=5),
            transport="auto",
        )
        outcomes += [step(model, randn(9, 136, device=device)), model(x[:0])]
        return outcomes, copy.deepcopy(layer.state_dict())


@case
def own_transport(device: str) -> Any:
    class LoopBack(moefp8.distributed.Transport):
        def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
            return rows

        def combine(self, rows: torch.Tensor) -> torch.Tensor:
            return rows

    x, (ids, scores) = randn(7, 136, device=device), choices(7, 2, 5, device)
    with single_group(device) as mesh:
        experts = moefp8.GroupedExperts(5, 136, 72, device=device)
        layer = ExpertParallel(experts, mesh, transport=LoopBack)
        outcome = step(layer, x, ids, scores)
    alone: Any = None
    transport = LoopBack(group=alone, calls=[], ids=ids)
    incomplete = attempt(lambda: moefp8.distributed.Transport(group=alone, calls=[], ids=ids))
    return outcome, transport.combine(rows=transport.dispatch(rows=x)), incomplete


@long_case
def experts_on_two_ranks(device: str) -> Any:
    """Each has its own number of tokens; on one GPU, they share it."""
    torch.multiprocessing.spawn(_rank, (device,), nprocs=2)
    return [torch.load(f"{rank}.pt") for rank in range(2)]


def _rank(rank: int, device: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path("store").absolute()), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    outcomes = {}
    for kind in ("frozen", "trained", "adapted"):
        seed()
        experts = moefp8.GroupedExperts(5, 136, 72, device=device, trainable=kind == "trained")
        layer = ExpertParallel(experts, dist.group.WORLD, transport="collective")
        if kind == "adapted":
            moefp8.adapters.add_lora(layer, rank=2)
        for dtype in (BF16, torch.float32):
            x = randn(7, 136, device=device, dtype=dtype)[: 3 + 4 * rank]
            ids, scores = choices(7, 2, 5, device)
            outcomes[kind, str(dtype)] = step(layer, x, ids[: len(x)], scores[: len(x)])
    torch.save(outcomes, f"{rank}.pt")
    dist.destroy_process_group()


@case
def warnings_and_errors(device: str) -> Any:
    layer = _layer(device)
    with single_group(device) as mesh, warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        experts = ExpertParallel(moefp8.GroupedExperts(5, 136, 72, device=device), mesh)
        outcomes = [
            attempt(lambda: ExpertParallel(layer, mesh)),
            attempt(lambda: ExpertParallel(layer.experts, mesh, transport="letters")),
            attempt(lambda: expert_parallel(nn.Linear(3, 4), mesh)),
            attempt(lambda: experts(randn(3, 100, device=device), *choices(3, 2, 5, device))),
            attempt(lambda: moefp8.shard(layer, {"none": "experts"}, 0, 2)),
            attempt(lambda: moefp8.shard(layer, {"experts": "layers"}, 0, 2)),
            attempt(lambda: moefp8.shard(layer, {"experts": "experts"}, 2, 2)),
            attempt(lambda: moefp8.prepare_ddp(_layer("meta"))),
        ]
    ours = [str(x.message) for x in raised if "moefp8" in str(x.filename)]
    return outcomes, ours
