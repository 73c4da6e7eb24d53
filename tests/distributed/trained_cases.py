"""What each of the two processes of `test_trained.py` runs: models of trained FP8 modules.

Master weights are FP32, and losses are means over ranks: then one process that takes the batches of
both ranks comes to the same bits, since halves of gradients are exact.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moefp8
from moefp8 import FP8Linear, MoE

RANKS, STEPS, H, WIDE = 2, 2, 136, 256
Wrap = Callable[[nn.Module], nn.Module]


class Trained(nn.Module):
    """A linear whose shards hold whole blocks, experts that shard evenly, and a linear of 81 rows.

    The shared experts' 40 rows are no whole blocks.
    """

    def __init__(self, seed: int = 0, num_experts: int = 4, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(seed)
        options: dict[str, Any] = {"trainable": True, "dtype": torch.float32, "device": device}
        self.first = FP8Linear(H, WIDE, **options)
        self.moe = MoE(WIDE, 72, num_experts, 2, shared_intermediate_size=40, **options)
        self.last = FP8Linear(WIDE, 81, **options)
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints:
            return self.last(checkpoint(self.middle, x, use_reentrant=False))
        return self.last(self.middle(x))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.first(x))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(9, H, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, ranks: Iterable[int], step: int = 0) -> torch.Tensor:
    outputs = [model(batch(rank, step)) for rank in ranks]
    return torch.stack([(y.float() - 1).square().mean() for y in outputs]).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05)


def train(
    model: nn.Module,
    ranks: Iterable[int],
    optimizer: torch.optim.Optimizer | None = None,
    max_norm: float | None = None,
) -> nn.Module:
    optimizer = optimizer or sgd(model)
    for step in range(STEPS):
        loss_of(model, ranks, step).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole, and the same whether wrapped or not."""
    return {
        name.removeprefix("module."): (
            x.full_tensor() if isinstance(x, DTensor) else x.detach().clone()
        )
        for name, x in model.named_parameters()
    }


def mesh() -> dist.DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(moefp8.prepare_ddp(model))


def fsdp(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh(), **options)


def fsdp_parts(model: Any, *, gathers_codes: bool = False, **options: Any) -> nn.Module:
    """Each layer is a group of its own."""
    if gathers_codes:
        assert moefp8.prepare_fsdp(model) is model
    for part in (model.first, model.moe, model.last):
        fsdp(part, **options)
    return fsdp(model, **options)


codes = partial(fsdp_parts, gathers_codes=True)


def trained(rank: int, wrap: Wrap, checkpoints: bool = False, seed: int = 0) -> Any:
    model = Trained(seed)
    model.checkpoints = checkpoints
    return weights_of(train(wrap(model), [rank]))


def in_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % RANKS == 0 else None


def clipped(rank: int, wrap: Wrap | None, **options: Any) -> Any:
    """AdamW, with gradients that are clipped to a hundredth of their norm."""
    model = Trained() if wrap is None else wrap(Trained())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **options)
    return weights_of(train(model, range(RANKS) if wrap is None else [rank], optimizer, 1e-2))


def accumulated(rank: int, wrap: Wrap) -> Any:
    """Two micro-batches, and gradients are reduced behind the second."""
    model: Any = wrap(Trained())
    model.set_requires_gradient_sync(False)
    (loss_of(model, [rank], 0) / 2).backward()
    model.set_requires_gradient_sync(True)
    (loss_of(model, [rank], 1) / 2).backward()
    sgd(model).step()
    return weights_of(model)


def accumulated_alone() -> Any:
    model = Trained()
    for rank in range(RANKS):  # the order in which FSDP adds
        ((loss_of(model, [rank], 0) / 2) / RANKS).backward()
        ((loss_of(model, [rank], 1) / 2) / RANKS).backward()
    sgd(model).step()
    return weights_of(model)


def from_meta(rank: int, wrap: Wrap) -> Any:
    """Sharded on the meta device, and filled afterwards."""
    model = wrap(Trained(device="meta")).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, Trained().state_dict(), options=options)
    return weights_of(train(model, [rank])), gathered_bytes(model, rank)


def gathered_bytes(model: nn.Module, rank: int) -> int:
    """What a forward and a backward gather."""
    with Gathers() as gathers:
        loss_of(model, [rank]).backward()
    return gathers.num_bytes


class Gathers(TorchDispatchMode):
    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and "allgather" in func._opname:
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


COUNTED = "quantize_128x128_both_into", "quantize_128x128", "transpose_codes_into"


def counts(rank: int, wrap: Wrap) -> Any:
    """How often weights are quantized or transposed in a step that is not the first, on rank 0."""
    model = wrap(Trained())
    num_bytes = [gathered_bytes(model, rank) for _ in range(2)][1]
    found: dict[str, int] = {"bytes": num_bytes}
    if rank > 0:
        loss_of(model, [rank]).backward()
        return found
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        loss_of(model, [rank]).backward()
    called = Counter(x.name.removeprefix("moefp8::") for x in profile.function_events)
    return found | {name: called[name] for name in COUNTED}


def bytes_alone(rank: int, wrap: Wrap) -> Any:
    return {"bytes": gathered_bytes(wrap(Trained()), rank)}


def in_bf16(rank: int, wrap: Wrap) -> Any:
    model: Any = wrap(Trained())
    loss_of(model, [rank]).backward()
    grads = {name: x.grad for name, x in model.named_parameters()}
    return {
        "dtypes": sorted({str(x.dtype) for x in grads.values()}),
        "gradients": {name: x.full_tensor() for name, x in grads.items()},
    }


def gradients_alone() -> Any:
    model = Trained()
    loss_of(model, range(RANKS)).backward()
    return {name: x.grad for name, x in model.named_parameters()}


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def policy(model: Any, *, gathers_codes: bool) -> nn.Module:
    """BF16 for what is gathered, but not for the router."""
    if gathers_codes:
        moefp8.prepare_fsdp(model)
    fsdp(model.moe.gate)
    return fsdp_parts(model, mp_policy=BF16)


def saved_and_loaded(rank: int, folder: Path, wrap: Wrap, then: Wrap) -> Any:
    """Sharded weights and optimizer state go through files, to a model that was wrapped by `then`.

    What comes are weights after more steps, of the old model and of the new one.
    """
    model, other = wrap(Trained()), then(Trained(1))
    first, second = (torch.optim.AdamW(x.parameters(), 1e-3) for x in (model, other))
    train(model, [rank], first)
    of_model, of_optimizer = get_state_dict(model, first)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    of_model, of_optimizer = get_state_dict(other, second)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(other, second, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return [weights_of(train(x, [rank], y)) for x, y in ((model, first), (other, second))]


def uneven(rank: int, wrap: Wrap) -> Any:
    return weights_of(train(wrap(Trained(num_experts=3)), [rank]))


class Norm(FP8Linear):
    """Reads the values of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.weight.norm()


def reads_values(rank: int) -> Any:
    model: Any = Trained()
    model.first = Norm(H, WIDE, trainable=True)
    return fsdp_parts(model, gathers_codes=True)(batch(rank))


def compiled(rank: int, wrap: Wrap) -> Any:
    model = Trained()
    model.first.compile(backend="aot_eager", fullgraph=True)
    return weights_of(train(wrap(model), [rank]))


OFFLOAD = CPUOffloadPolicy(pin_memory=False)
EXACT: dict[str, Callable[[int], Any]] = {
    "ddp": lambda rank: trained(rank, ddp),
    "ddp, other seeds": lambda rank: trained(rank, ddp, seed=rank),
    "ddp, checkpointed": lambda rank: trained(rank, ddp, checkpoints=True),
    "fsdp": lambda rank: trained(rank, fsdp),
    "fsdp, parts": lambda rank: trained(rank, fsdp_parts),
    "fsdp, checkpointed": lambda rank: trained(rank, fsdp_parts, checkpoints=True),
    "fsdp, kept": lambda rank: trained(rank, partial(fsdp_parts, reshard_after_forward=False)),
    "codes": lambda rank: trained(rank, codes),
    "codes, checkpointed": lambda rank: trained(rank, codes, checkpoints=True),
    "codes, kept": lambda rank: trained(rank, partial(codes, reshard_after_forward=False)),
    "codes, offloaded": lambda rank: trained(rank, partial(codes, offload_policy=OFFLOAD)),
    "codes, compiled": lambda rank: compiled(rank, codes),
    "codes, twice": lambda rank: trained(rank, lambda x: codes(moefp8.prepare_fsdp(x))),
    "codes, columns": lambda rank: trained(rank, partial(codes, shard_placement_fn=in_columns)),
}
CASES: dict[str, Callable[[int], Any]] = EXACT | {
    "accumulated": lambda rank: accumulated(rank, fsdp_parts),
    "accumulated, codes": lambda rank: accumulated(rank, codes),
    "from meta": lambda rank: from_meta(rank, codes),
    "adamw": lambda rank: clipped(rank, fsdp_parts),
    "adamw, codes": lambda rank: clipped(rank, codes),
    "adamw, codes, fused": lambda rank: clipped(rank, codes, fused=True),
    "adamw, codes, one by one": lambda rank: clipped(rank, codes, foreach=False),
    "counts": lambda rank: counts(rank, fsdp_parts),
    "counts, kept": lambda rank: bytes_alone(
        rank, partial(fsdp_parts, reshard_after_forward=False)
    ),
    "counts, codes": lambda rank: counts(rank, codes),
    "counts, codes, kept": lambda rank: counts(rank, partial(codes, reshard_after_forward=False)),
    "bf16": lambda rank: in_bf16(rank, partial(policy, gathers_codes=False)),
    "bf16, codes": lambda rank: in_bf16(rank, partial(policy, gathers_codes=True)),
    "uneven": lambda rank: uneven(rank, fsdp_parts),
    "uneven, codes": lambda rank: uneven(rank, codes),
    "reads values": reads_values,
    "too late": lambda rank: moefp8.prepare_fsdp(fsdp(Trained())),
}


def run_cases(rank: int, folder: Path) -> None:
    """Write all results to `folder`, exceptions as their texts."""
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store", timedelta(minutes=2)
    dist.init_process_group("gloo", store, timeout, world_size=RANKS, rank=rank)
    results: dict[str, Any] = {
        "alone": weights_of(train(Trained(), range(RANKS))),
        "adamw, alone": clipped(0, None),
        "accumulated, alone": accumulated_alone(),
        "gradients, alone": gradients_alone(),
    }
    saved = {
        "saved": lambda rank: saved_and_loaded(rank, folder / "a", codes, codes),
        "saved, then plain": lambda rank: saved_and_loaded(rank, folder / "b", codes, fsdp_parts),
    }
    for name, case in (CASES | saved).items():
        try:
            results[name] = case(rank)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            results[name] = f"{type(error).__name__}: {error}"
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # threads that torch leaves behind may abort a process that ends as usual
