"""One of two ranks of `test_data_parallel.py`: python data_parallel_cases.py RANK FOLDER.

Each case trains what follows frozen FP8 modules, and gives what both ranks must agree on. Results
go to FOLDER/RANK.pt, an exception as its text.
"""

import sys
from collections.abc import Callable, Iterable
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

import moefp8
from moefp8 import FP8Linear, GroupedExperts, MoE

RANKS, STEPS, H = 2, 3, 136


class Tuned(nn.Module):
    """An adapter and a head, in FP32, on what frozen FP8 layers see."""

    def __init__(self, seed: int = 0, num_experts: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(50, H).requires_grad_(False)
        self.moe = MoE(H, 72, num_experts, 2, shared_intermediate_size=40).requires_grad_(False)
        self.linear = FP8Linear(H, 81)
        self.adapter, self.head = nn.Linear(81, 81), nn.Linear(81, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.linear(self.moe(self.embedding(ids)))
        return self.head(features + self.adapter(features))


def batch(rank: int) -> torch.Tensor:
    return torch.arange(7) * 5 + rank


def train(model: nn.Module, ranks: Iterable[int]) -> list[torch.Tensor]:
    """A few steps on the batches of all ranks given; the first outputs."""
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


def alone() -> dict[str, Any]:
    """What both ranks must come to: trained on all batches in one process."""
    model = Tuned()
    before = trained_of(model)
    return {"outputs": train(model, range(RANKS)), "trained": trained_of(model), "before": before}


def trained_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: whole(x).detach().clone() for name, x in named if "adapter" in name}


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def wrapped(rank: int, wrap: Callable[[nn.Module], nn.Module], seed: int = 0) -> dict[str, Any]:
    model = Tuned(seed)
    runs = wrap(model)
    (output,) = train(runs, [rank])
    with FullyShardedDataParallel.summon_full_params(runs):  # of no effect on other kinds
        trained = {name.split("module.")[-1]: x for name, x in trained_of(model).items()}
    return {"output": output, "trained": trained, "local": local_bytes(model)}


def local_bytes(model: nn.Module) -> int:
    """Of FP8 weights on this rank."""
    weights = [x.to_local() if isinstance(x, DTensor) else x for x in model.parameters()]
    return sum(x.numel() for x in weights if x.dtype == torch.float8_e4m3fn)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(moefp8.prepare_ddp(model))


def fsdp1(model: nn.Module) -> nn.Module:
    frozen = list(moefp8.frozen_parameters(model).values())
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, device_id=cpu, use_orig_params=True, ignored_states=frozen
    )


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), **options)


def fsdp2_ignoring(model: nn.Module, **options: Any) -> nn.Module:
    return fsdp2(model, ignored_params=set(moefp8.frozen_parameters(model).values()), **options)


def fsdp2_each(model: nn.Module, **options: Any) -> nn.Module:
    """FP8 modules and routers are groups of their own, without the policy of the rest."""
    for module in list(model.modules()):
        if isinstance(module, FP8Linear | GroupedExperts | moefp8.TopKRouter):
            fsdp2(module)
    return fsdp2(model, **options)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


def ddp_of_another_seed(rank: int) -> dict[str, Any]:
    """Rank 0 has the model of the others' cases; DDP gives it to all."""
    return wrapped(rank, ddp, seed=rank)


def inference(rank: int) -> dict[str, Any]:
    model = Tuned()
    with torch.no_grad():
        return {"output": ddp(model)(batch(rank))}


def other_experts(rank: int) -> Any:
    return moefp8.prepare_ddp(Tuned(num_experts=2 + rank))


def sharded(rank: int) -> Any:
    model = Tuned(num_experts=4)
    return moefp8.prepare_ddp(moefp8.shard(model, {"moe.experts": "experts"}, rank, RANKS))


def meta(rank: int) -> Any:
    with torch.device("meta"):
        return moefp8.prepare_ddp(Tuned())


CASES: dict[str, Callable[[int], Any]] = {
    "ddp": partial(wrapped, wrap=ddp),
    "ddp, other seeds": ddp_of_another_seed,
    "ddp, inference": inference,
    "fsdp1": partial(wrapped, wrap=fsdp1),
    "fsdp2": partial(wrapped, wrap=fsdp2),
    "fsdp2, ignored": partial(wrapped, wrap=fsdp2_ignoring),
    "fsdp2, bf16, ignored": partial(wrapped, wrap=partial(fsdp2_ignoring, mp_policy=BF16)),
    "fsdp2, bf16, each": partial(wrapped, wrap=partial(fsdp2_each, mp_policy=BF16)),
    "fsdp2, bf16": partial(wrapped, wrap=partial(fsdp2, mp_policy=BF16)),
    "other experts": other_experts,
    "sharded": sharded,
    "meta": meta,
}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    results: dict[str, Any] = {"alone": alone()}
    for name, case in CASES.items():
        try:
            results[name] = case(rank)
        except (TypeError, ValueError, RuntimeError) as error:
            results[name] = f"{type(error).__name__}: {error}"
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
