"""What the process of each GPU times: all take the same turns."""

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.expert_parallel.cases import Layer, experts_of, tokens_of
from benchmarks.expert_parallel.providers import OURS, PROVIDERS, Given
from benchmarks.peers import first_line
from moefp8.distributed.expert_parallel.agreement import Call as Agreed
from moefp8.distributed.expert_parallel.group import ExpertGroup

DISPATCH, COMBINE, MEETINGS = "dispatch", "combine", "meetings alone"
COPY = "copy"  # of as many bytes into the other GPU's memory
_WARM_UPS, _LEAD_IN_US = 3, 20_000.0
Run = Callable[[], Any]


def work(
    rank: int,
    num_ranks: int,
    store: str,
    layers: Sequence[Layer],
    tokens: Sequence[int],
    rounds: int,
    seconds: float,
    queue: Any,
) -> None:
    """Time all cases; rank 0 puts each row on the queue, then None.

    A process has one thread, as `torchrun` gives it: threads for all cores in each of two made the
    host's part of an exchange over NCCL take 150 ms in place of 4.
    """
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    timeout = timedelta(minutes=2)
    options: dict[str, Any] = {"timeout": timeout, "device_id": device}
    dist.init_process_group("nccl", f"file://{store}", rank=rank, world_size=num_ranks, **options)
    groups = {"peers": dist.group.WORLD, "collective": dist.new_group(list(range(num_ranks)))}
    with torch.no_grad():
        for layer in layers:
            whole = experts_of(layer)
            for num_tokens in tokens:
                given = Given(
                    layer, whole, rank, num_ranks, tokens_of(layer, num_tokens, rank), groups
                )
                row = _row(given, rounds, seconds)
                if rank == 0:
                    queue.put(row)
                torch.cuda.empty_cache()
            del whole, given
    dist.barrier()
    if rank == 0:
        queue.put(None)
        queue.close()
        queue.join_thread()
    os._exit(0)


def _row(given: Given, rounds: int, seconds: float) -> dict[str, Any]:
    """A case: of each provider the time of a call, or why there is none, and its error."""
    runs: dict[str, Run] = {}
    found: dict[str, dict[str, Any]] = {}
    reference = given.whole(*given.tokens).float()
    for name, provider in PROVIDERS.items():
        found[name] = {}
        try:
            call = provider.prepare(given)
            error = (call().float() - reference).norm() / reference.norm()
            found[name]["error"] = round(_most(error.item()), 5)
            runs[name] = _captured(call) if provider.captures else call
        except Exception as error:  # all ranks raise it
            found[name]["refused"] = first_line(error)
    moves, num_bytes = _moves(given)
    times = _in_turns(runs | moves, rounds, seconds)
    for name in runs:
        found[name]["us"] = round(statistics.median(times[name]), 1)
        if name != OURS:
            ratios = [a / b for a, b in zip(times[name], times[OURS], strict=True)]
            found[name]["ratio"] = round(statistics.median(ratios), 3)
            found[name]["least"], found[name]["most"] = (round(f(ratios), 3) for f in (min, max))
    us = {name: statistics.median(times[name]) for name in moves}
    return {
        "layer": given.layer.name,
        "tokens": len(given.tokens[0]),
        "ranks": given.num_ranks,
        "peers": found,
        "moves": _moves_of(us, num_bytes),
    }


def _in_turns(runs: dict[str, Run], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds of a call in each round: all ranks run the same at the same time."""
    repeats = {}
    for name, run in runs.items():
        begin = time.perf_counter()
        for _ in range(_WARM_UPS):
            run()
        torch.cuda.synchronize()
        us = _most((time.perf_counter() - begin) / _WARM_UPS * 1e6)
        repeats[name] = max(5, round(seconds * 1e6 / us)), max(1, round(_LEAD_IN_US / us))
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            num_calls, num_before = repeats[name]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier()
            for _ in range(num_before):
                runs[name]()
            begin.record()
            for _ in range(num_calls):
                runs[name]()
            end.record()
            torch.cuda.synchronize()
            times[name].append(_most(begin.elapsed_time(end) / num_calls * 1e3))
    return times


def _most(value: float) -> float:
    """The largest of all ranks'."""
    largest = torch.tensor([value], device="cuda", dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _captured(call: Run) -> Run:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# ---- The moves alone ----


def _moves(given: Given) -> tuple[dict[str, Run], dict[str, int]]:
    """Exchanges without experts, copies of as many bytes, and how many these are for a rank.

    A dispatch ends the turn of the dispatch before, to which no results have come.
    """
    group = ExpertGroup.of(given.groups["peers"])
    (x, ids, scores), layer = given.tokens, given.layer
    num_tokens, num_ranks = len(x), given.num_ranks
    number = group.number_layer()

    def transport_of(n: int) -> Any:
        sizes = layer.num_experts, layer.hidden_size, layer.top_k
        call = Agreed(0, number, *sizes, num_tokens=n)
        return group.transport_for([call] * num_ranks, ids[:n])

    y = torch.zeros(num_ranks * num_tokens, layer.hidden_size, device="cuda", dtype=x.dtype)

    def dispatch(n: int) -> None:
        transport_of(n).dispatch_codes(x[:n], scores[:n])

    def dispatch_and_combine() -> None:
        transport = transport_of(num_tokens)
        transport.dispatch_codes(x, scores)
        transport.combine(y)

    owner = ids // (layer.num_experts // num_ranks)
    others = [r for r in range(num_ranks) if r != given.rank]
    reached = sum(int((owner == r).any(1).sum()) for r in others)
    h = layer.hidden_size
    num_bytes = {
        DISPATCH: reached * (h + h // 128 * 4) + len(others) * ids.numel() * 8,
        COMBINE: reached * h * 2,
    }
    import torch.distributed._symmetric_memory as symmetric

    size = int(_most(max(num_bytes.values())))  # the same on all ranks
    memory = symmetric.empty(size, dtype=torch.uint8, device=x.device)
    handle: Any = symmetric.rendezvous(memory, dist.group.WORLD)
    there = handle.get_buffer((given.rank + 1) % num_ranks, memory.shape, torch.uint8)
    own = torch.zeros_like(memory)
    runs: dict[str, Run] = {
        MEETINGS: lambda: dispatch(1),
        DISPATCH: lambda: dispatch(num_tokens),
        COMBINE: dispatch_and_combine,
    }

    def copy(n: int) -> None:
        there[:n].copy_(own[:n])

    for name, n in num_bytes.items():
        runs[f"{COPY} of {name}"] = partial(copy, n)
    captured = {name: _captured(run) for name, run in runs.items()}
    kept = memory, handle, own, y
    return {name: _keeping(run, *kept) for name, run in captured.items()}, num_bytes


def _keeping(run: Run, *kept: Any) -> Run:
    """A graph knows addresses alone: what lies there has to live as long."""
    return lambda kept=kept: run()


def _moves_of(us: dict[str, float], num_bytes: dict[str, int]) -> dict[str, Any]:
    """Of dispatch and combine: bytes, their own time, that of a copy, and the share of its speed.

    A meeting, of one token, counts half of those of a dispatch and of the end of its turn; what is
    left of a combine behind a dispatch is its own, with the sum over ranks.
    """
    own = {DISPATCH: us[DISPATCH] - us[MEETINGS] / 2}
    own[COMBINE] = us[COMBINE] - own[DISPATCH]
    found: dict[str, Any] = {MEETINGS: round(us[MEETINGS], 1)}
    for name, n in num_bytes.items():
        copy = us[f"{COPY} of {name}"]
        found[name] = {
            "bytes": n,
            "us": round(own[name], 1),
            "copy_us": round(copy, 1),
            "share": round(copy / own[name], 3),
        }
    return found
