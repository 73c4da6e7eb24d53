"""How long calls take on the GPU, beside each other."""

import random
import statistics
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import TypeVar

import torch

C = TypeVar("C", bound=Hashable)

_FLUSH_BYTES = 1 << 30  # reading takes a quarter of a millisecond: the host launches meanwhile


def us_in_turns(calls: Mapping[C, Callable[[], int]], repeats: int) -> dict[C, float]:
    """The median time of each call on the stream; L2 holds no operands at first.

    calls: they return how often they did what is timed, and take turns in random order, so that all
        meet the same clocks.
    """
    flushed, order = _buffer_larger_than_l2(torch.cuda.current_device()), random.Random(0)
    times: dict[C, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    events = []
    for _ in range(repeats):
        for name in order.sample(list(calls), len(calls)):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.sum()
            before.record()
            count = calls[name]()
            after.record()
            events.append((name, before, after, count))
        torch.cuda.synchronize()
    for name, before, after, count in events:
        times[name].append(before.elapsed_time(after) * 1e3 / count)
    return {name: statistics.median(each) for name, each in times.items()}


@cache
def _buffer_larger_than_l2(device_index: int) -> torch.Tensor:
    return torch.ones(_FLUSH_BYTES // 8, dtype=torch.int64, device=f"cuda:{device_index}")
