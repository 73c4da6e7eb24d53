"""What each of the two processes of `test_data_parallel.py` runs.

Most cases train what stands before and behind frozen FP8 modules, and give what both ranks must
agree on.
"""

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moefp8
from moefp8 import FP8Linear, GroupedExperts, MoE

RANKS, STEPS, H = 2, 3, 136


class Tuned(nn.Module):
    """An adapter before frozen FP8 layers, which gradients reach through them, and a head."""

    def __init__(self, seed: int = 0, num_experts: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(50, H).requires_grad_(False)
        self.moe = MoE(H, 72, num_experts, 2, shared_intermediate_size=40).requires_grad_(False)
        self.linear = FP8Linear(H, 81)
        self.adapter, self.head = nn.Linear(H, H), nn.Linear(81, 10)
        self.checkpoints = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.adapter(x)
        if self.checkpoints:
            return self.head(checkpoint(self.frozen, x, use_reentrant=False))
        return self.head(self.frozen(x))

    def frozen(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.moe(x))


def batch(rank: int) -> torch.Tensor:
    return torch.arange(7) * 5 + rank


def train(model: nn.Module, ranks: Iterable[int]) -> list[torch.Tensor]:
    """Take a few steps on the batches of `ranks`; return the first outputs."""
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05)
    first: list[torch.Tensor] = []
    for _ in range(STEPS):
        outputs = [model(batch(rank)) for rank in ranks]
        first = first or [y.detach() for y in outputs]
        torch.stack([(y - 1).square().mean() for y in outputs]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return first


def whole(seed: int = 0) -> nn.Module:
    """The same with master weights, which have codes already."""
    model = moefp8.unfreeze(Tuned(seed), torch.float32)
    model(batch(0))
    return model


def alone(model: nn.Module) -> dict[str, Any]:
    """What both ranks must come to: one process trains on all batches."""
    before = adapter_of(model), sum_of_codes(model)
    outputs = train(model, range(RANKS))
    results = {"outputs": outputs, "trained": adapter_of(model)}
    return {**results, "before": before[0], "sum_of_codes": before[1]}


def adapter_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.split("module.")[-1]: (
            x.full_tensor() if isinstance(x, DTensor) else x.clone()
        ).detach()
        for name, x in model.named_parameters()
        if "adapter" in name or (x.requires_grad and ("_proj" in name or "linear" in name))
    }


def codes_of(model: nn.Module) -> list[torch.Tensor]:
    """Those that this rank holds."""
    held = [x.to_local() if isinstance(x, DTensor) else x for x in model.parameters()]
    return [x.detach() for x in held if x.dtype == torch.float8_e4m3fn]


def sum_of_codes(model: nn.Module) -> int:
    return sum(int(x.view(torch.uint8).sum()) for x in codes_of(model))


def wrapped(
    rank: int,
    wrap: Callable[[nn.Module], nn.Module],
    seed: int = 0,
    checkpoints: bool = False,
    make: Callable[[int], nn.Module] = Tuned,
) -> dict[str, Any]:
    model: Any = make(seed)
    model.checkpoints = checkpoints
    runs = wrap(model)
    (output,) = train(runs, [rank])
    with FullyShardedDataParallel.summon_full_params(runs):  # this changes nothing of other kinds
        trained = adapter_of(model)
    num_codes = sum(x.numel() for x in codes_of(model))
    sums = sum_of_codes(model)
    return {"output": output, "trained": trained, "num_codes": num_codes, "sum_of_codes": sums}


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(moefp8.prepare_ddp(model))


def fsdp1(model: nn.Module) -> nn.Module:
    frozen = list(moefp8.frozen_parameters(model).values())
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(model, ignored_states=frozen, **options)


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), **options)


def fsdp2_ignoring(model: nn.Module, **options: Any) -> nn.Module:
    return fsdp2(model, ignored_params=set(moefp8.frozen_parameters(model).values()), **options)


def fsdp2_parts(model: nn.Module) -> nn.Module:
    """What is checkpointed is gathered twice."""
    fsdp2(model.moe)
    fsdp2(model.linear)
    return fsdp2(model)


def fsdp2_each(model: nn.Module, **options: Any) -> nn.Module:
    """FP8 modules and routers are groups of their own, without the policy of the rest."""
    for module in list(model.modules()):
        if isinstance(module, FP8Linear | GroupedExperts | moefp8.TopKRouter):
            fsdp2(module)
    return fsdp2(model, **options)


@torch.no_grad()
def inference(rank: int) -> dict[str, Any]:
    return {"output": ddp(Tuned())(batch(rank))}


def sharded(rank: int) -> nn.Module:
    model = moefp8.shard(Tuned(num_experts=4), {"moe.experts": "experts"}, rank, RANKS)
    return moefp8.prepare_ddp(model)


BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)}
CASES: dict[str, Callable[[int], Any]] = {
    "ddp": lambda rank: wrapped(rank, ddp),
    "ddp, other seeds": lambda rank: wrapped(rank, ddp, seed=rank),  # the model of rank 0 counts
    "ddp, checkpointed": lambda rank: wrapped(rank, ddp, checkpoints=True),
    "ddp, inference": inference,
    "fsdp1": lambda rank: wrapped(rank, fsdp1),
    "fsdp2": lambda rank: wrapped(rank, fsdp2),
    "fsdp2, checkpointed": lambda rank: wrapped(rank, fsdp2_parts, checkpoints=True),
    "fsdp2, ignored": lambda rank: wrapped(rank, fsdp2_ignoring),
    "fsdp2, bf16, ignored": lambda rank: wrapped(rank, partial(fsdp2_ignoring, **BF16)),
    "fsdp2, bf16, each": lambda rank: wrapped(rank, partial(fsdp2_each, **BF16)),
    "fsdp2, bf16": lambda rank: wrapped(rank, partial(fsdp2, **BF16)),
    "ddp, whole": lambda rank: wrapped(rank, ddp, make=whole),
    "ddp, whole, other seeds": lambda rank: wrapped(rank, ddp, seed=rank, make=whole),
    "fsdp1, whole": lambda rank: wrapped(rank, fsdp1, make=whole),
    "fsdp2, whole": lambda rank: wrapped(rank, fsdp2, make=whole),
    "fsdp2, whole, checkpointed": lambda rank: wrapped(
        rank, fsdp2_parts, checkpoints=True, make=whole
    ),
    "other experts": lambda rank: moefp8.prepare_ddp(Tuned(num_experts=2 + rank)),
    "sharded": sharded,
    "meta": lambda rank: moefp8.prepare_ddp(Tuned().to("meta")),
}


def run_cases(rank: int, folder: Path) -> None:
    """Write all results to `folder`, exceptions as their texts."""
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store", timedelta(minutes=1)
    dist.init_process_group("gloo", store, timeout, world_size=RANKS, rank=rank)
    results: dict[str, Any] = {"alone": alone(Tuned()), "whole, alone": alone(whole())}
    for name, case in CASES.items():
        try:
            results[name] = case(rank)
        except (TypeError, ValueError, RuntimeError) as error:
            results[name] = f"{type(error).__name__}: {error}"
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # threads that torch leaves behind may abort a process that ends as usual
