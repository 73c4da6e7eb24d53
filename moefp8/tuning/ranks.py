"""Time experts that processes share: what `python -m moefp8 bench --ranks` does.

Each process has a GPU of its own, if there are any; else they share the processors. T tokens of a
rank, E experts, k of them for a token.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..distributed import ExpertParallel
from ..kernels.gemm.sm90.tuned import Experts
from ..layers import GroupedExperts

_ROUNDS, _SECONDS = 5, 0.1  # the median counts; of each round, at least
_MOST_CALLS = 1000


@dataclass(frozen=True)
class RanksTime:
    """One call of T tokens on each rank, beside one call of all of them in one process.

    ms: of the slowest rank. alone_ms: of one process with all experts and all processors.
    """

    layer: Experts
    num_ranks: int
    tokens: int
    ms: float
    alone_ms: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_ranks * self.tokens / self.ms * 1e3


def tokens_to_time(max_tokens: int) -> list[int]:
    """Powers of 8, and the most."""
    powers = [8**i for i in range(max_tokens.bit_length()) if 8**i < max_tokens]
    return [*powers, max_tokens]


def check_ranks(layers: Sequence[Experts], num_ranks: int) -> None:
    """Raise ValueError if these cannot be timed here."""
    if num_ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {num_ranks}")
    if not (dist.is_available() and dist.is_gloo_available()):
        raise ValueError("--ranks needs a torch with torch.distributed and gloo")
    num_gpus = torch.cuda.device_count()
    if 0 < num_gpus < num_ranks:
        raise ValueError(
            f"--ranks {num_ranks} needs as many GPUs, one for each process, got {num_gpus}; "
            "CUDA_VISIBLE_DEVICES= hides them, so that processes run on CPUs"
        )
    for layer in layers:
        if layer.num_experts < num_ranks or layer.top_k > layer.num_experts:
            raise ValueError(
                f"--ranks {num_ranks}: each rank must hold an expert, and a token can choose each "
                f"expert once, got {layer.num_experts} experts, {layer.top_k} of them a token"
            )


def time_ranks(
    layers: Sequence[Experts], num_ranks: int, max_tokens: int
) -> Iterator[list[RanksTime]]:
    """Start `num_ranks` processes, and give the times of each layer when it is done.

    Raises ValueError as `check_ranks`. What a process raises ends all, and is raised with its
    traceback.
    """
    check_ranks(layers, num_ranks)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = num_ranks, Path(folder) / "store", tuple(layers), max_tokens, queue
        processes = torch.multiprocessing.spawn(_serve, given, nprocs=num_ranks, join=False)
        num_done = 0
        while num_done < len(layers):
            has_ended = processes.join(timeout=0.05)
            while not queue.empty():
                num_done += 1
                yield queue.get()
            if has_ended and num_done < len(layers):
                raise RuntimeError(f"processes ended after {num_done} of {len(layers)} layers")
        while not processes.join():
            pass


def _serve(
    rank: int, num_ranks: int, store: Path, layers: Sequence[Experts], max_tokens: int, queue: Any
) -> None:
    has_gpu, num_threads = torch.cuda.is_available(), torch.get_num_threads()
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=num_ranks)
    for layer in layers:
        sizes = layer.num_experts, layer.hidden_size, layer.intermediate_size
        alone_ms = {}
        if rank == 0:
            whole = GroupedExperts(*sizes, device=device)
            for tokens in tokens_to_time(max_tokens):
                call = partial(whole, *_choices(layer, num_ranks * tokens, device))
                alone_ms[tokens] = statistics.median(_times(call, None))
            del whole, call
        dist.barrier()
        torch.set_num_threads(max(1, num_threads // num_ranks))
        experts = ExpertParallel(GroupedExperts(*sizes, device="meta"), dist.group.WORLD)
        experts.to_empty(device=device).experts.reset_parameters()
        found = []
        for tokens in tokens_to_time(max_tokens):
            call = partial(experts, *_choices(layer, tokens, device))
            rounds = torch.tensor(_times(call, dist.group.WORLD)).to(device)
            dist.all_reduce(rounds, dist.ReduceOp.MAX)
            ms = float(rounds.median())
            if rank == 0:
                found.append(RanksTime(layer, num_ranks, tokens, ms, alone_ms[tokens]))
        torch.set_num_threads(num_threads)
        if rank == 0:
            queue.put(found)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads that torch leaves behind may abort a process that ends as usual


def _choices(
    layer: Experts, num_tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens, each with k experts of all, and weights that sum up to 1."""
    x = torch.randn(num_tokens, layer.hidden_size, device=device).bfloat16()
    scores, ids = torch.rand(num_tokens, layer.num_experts, device=device).topk(layer.top_k)
    return x, ids, scores / scores.sum(-1, keepdim=True)


@torch.inference_mode()
def _times(call: Callable[[], object], group: Any) -> list[float]:
    """Milliseconds of a call, of several rounds; ranks of a group call equally often."""
    for _ in range(3):
        seconds = _seconds_of(call, 1, group)
    count = min(_MOST_CALLS, max(1, round(_SECONDS / seconds)))
    if group is not None:
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, count, group)
        count = everyone[0]
    return [1e3 * _seconds_of(call, count, group) for _ in range(_ROUNDS)]


def _seconds_of(call: Callable[[], object], count: int, group: Any) -> float:
    if group is not None:
        dist.barrier(group)
    _wait()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    _wait()
    return (time.perf_counter() - begin) / count


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
