"""Timers for calls that launch CUDA kernels. All give microseconds: the median over many calls.

`device_us`, `device_us_many`, `layer_us_many`: how long the device works for one call, without
    gaps. What runs at the same time counts once: a kernel may wait for the one before it to end.
`graph_us_many`: how long the stream takes for one replay of the call as a CUDA graph.
`eager_us_many`: how long the stream takes for one call from an idle start, launches included.
`host_us`: how long one call keeps the calling thread.

The first three flush L2 before every call; caches are warm for `host_us`, which no kernel slows.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from moefp8.kernels import jit

Call = Callable[[], object]


class Event(NamedTuple):
    """A kernel, memset or copy on the device; microseconds."""

    name: str
    start: float
    end: float


# Reading these takes an eighth and half of a millisecond. With the former, a slow host launches the
# last of four kernels when the first is over, though they should overlap. But a GPU that has rested
# for long multiplies large matrices faster than one that had work.
FLUSH_BYTES, LONG_FLUSH_BYTES = 512 << 20, 2 << 30
_ATTEMPTS = 3


class Flush:
    """Evict everything from L2 by reading memory.

    It reads, because what a memset leaves in L2 is dirty: the timed kernel would pay for writing it
    back. `marker` holds the names of what one flush runs on the device, as the profiler saw them.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.ones(num_bytes // 8, dtype=torch.int64, device="cuda")
        self.marker = self._see_own_kernels()

    def __call__(self) -> torch.Tensor:
        return self._buffer.prod()

    def _see_own_kernels(self) -> tuple[str, ...]:
        repeats = 3
        for _ in range(_ATTEMPTS):  # the first profile of a process may miss its beginning
            events = _device_events(lambda: [self() for _ in range(repeats)])
            names = [event.name for event in events]
            marker = names[: len(names) // repeats]
            if marker and marker * repeats == names:
                return tuple(marker)
        raise RuntimeError(f"the profiler saw {names} for {repeats} equal flushes of L2")


@cache
def flush(num_bytes: int) -> Flush:
    return Flush(num_bytes)


def device_us(call: Call, repeats: int = 20) -> float:
    """How long at least one kernel, memset or copy of a call runs on the device."""
    return device_us_many({"": call}, repeats)[""]


def device_us_many(
    calls: Mapping[str, Call],
    repeats: int = 20,
    warm_up_seconds: float = 0.1,
    flush_bytes: int = FLUSH_BYTES,
) -> dict[str, float]:
    """`device_us` of each of `calls`, from one profile.

    The calls take turns in an order drawn anew every round, so that all meet the same clocks and
    temperature and none always follows the same neighbour.
    """
    clear_l2, order = flush(flush_bytes), random.Random(0)
    turns: list[str] = []
    for _ in range(repeats):
        turns += order.sample(list(calls), len(calls))

    def take_turns() -> None:
        for name in turns:
            clear_l2()
            calls[name]()

    _warm_up(calls.values(), clear_l2, warm_up_seconds)
    for _ in range(_ATTEMPTS):
        events = _device_events(take_turns)
        busy = busy_after(clear_l2.marker, events)
        if len(busy) == len(turns):
            break
    else:
        names = sorted({event.name[:80] for event in events})
        raise RuntimeError(f"the profiler saw {len(busy)} of {len(turns)} calls; it saw {names}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, microseconds in zip(turns, busy, strict=True):
        times[name].append(microseconds)
    idle = [name for name, each in times.items() if not min(each)]
    if idle:
        raise RuntimeError(f"the profiler saw calls of {idle} that ran nothing on the device")
    return {name: statistics.median(each) for name, each in times.items()}


def layer_us_many(calls: Mapping[str, Call], repeats: int = 20) -> dict[str, float]:
    """`device_us_many` of calls whose kernels overlap, as they do if the host is early enough."""
    return device_us_many(calls, repeats, flush_bytes=LONG_FLUSH_BYTES)


def _warm_up(calls: Collection[Call], clear_l2: Call, seconds: float) -> None:
    """Take turns for a while: right after a profile, what takes 93 us may take 107."""
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for call in calls:
            clear_l2()
            call()
        torch.cuda.synchronize()


def busy_after(marker: Sequence[str], events: Sequence[Event]) -> list[float]:
    """The length of the union of the events between occurrences of `marker`, a run of names.

    One length follows each marker; what precedes the first marker belongs to no call. `events` are
    in the order in which they start.
    """
    names, marker = [event.name for event in events], list(marker)
    busy: list[float] = []
    at, until = 0, 0.0
    while at < len(events):
        if names[at : at + len(marker)] == marker:
            busy.append(0.0)
            at += len(marker)
            until = events[at - 1].end
        else:
            _, start, end = events[at]
            if busy:
                busy[-1] += max(0.0, end - max(start, until))
            until = max(until, end)
            at += 1
    return busy


def _device_events(work: Call) -> list[Event]:
    """What `work` runs on the device, in the order in which it starts there."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    seen = [e for e in recorded.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    seen.sort(key=lambda event: event.time_range.start)
    return [Event(event.name, event.time_range.start, event.time_range.end) for event in seen]


def captured(call: Call) -> Call:
    """The replay of `call` as a CUDA graph. What cannot be captured raises, and hinders no other.

    The calls before it have the stream of the capture: autograd adds a gradient to a leaf on the
    stream where that leaf first took part, if something has kept that place since. The default
    stream is the only one that cannot take part in a capture.
    """
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            call()
    except Exception:
        torch.cuda.set_stream(current)  # where the capture's end failed, too, nobody has
        _end_capture()
        raise
    return graph.replay


def _end_capture() -> None:
    """Let random numbers be drawn again: their generator takes part in a capture that failed.

    A capture first sets counters of the generator in memory of the graph, on its own stream, which
    is waited for before the graph frees them.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.empty(1, device="cuda").zero_()
    torch.cuda.synchronize()


def on_driver(driver: jit.Driver, call: Call) -> Call:
    """`call` with the kernels and the prepared launches of that driver."""

    def run() -> object:
        with jit.using(driver):
            return call()

    return run


def graph_us_many(replays: Mapping[str, Call], repeats: int = 20) -> dict[str, float]:
    """Times of what `captured` gives; launching it, queued behind the flush, costs nothing."""
    return _stream_us_many(replays, repeats, idle_first=False)


def eager_us_many(calls: Mapping[str, Call], repeats: int = 20) -> dict[str, float]:
    return _stream_us_many(calls, repeats, idle_first=True)


def _stream_us_many(
    calls: Mapping[str, Call], repeats: int, *, idle_first: bool
) -> dict[str, float]:
    """The calls take turns, as in `device_us_many`: the host's clock and caches change, too.

    Garbage is collected before, and not meanwhile.
    """
    clear_l2, order = flush(LONG_FLUSH_BYTES), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    _warm_up(calls.values(), clear_l2, 0.1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for name in order.sample(list(calls), len(calls)):
                times[name].append(_between_events(calls[name], clear_l2, idle_first))
    finally:
        gc.enable()
    return {name: statistics.median(each) for name, each in times.items()}


def _between_events(call: Call, clear_l2: Call, idle_first: bool) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clear_l2()
    if idle_first:
        torch.cuda.synchronize()
    before.record()
    call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) * 1e3


def host_us(call: Call, repeats: int = 300) -> float:
    def once() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - started) / 1e3

    times = [once() for _ in range(10 + repeats)][10:]
    torch.cuda.synchronize()
    return statistics.median(times)


def copy_gbps(num_bytes: int = 1 << 30, repeats: int = 20) -> float:
    """The bandwidth of a copy on the device, bytes read plus bytes written, in GB/s."""
    source = torch.empty(num_bytes // 8, dtype=torch.int64, device="cuda").random_()
    target = torch.empty_like(source)
    microseconds = device_us(lambda: target.copy_(source), repeats)
    return 2 * num_bytes / microseconds / 1e3
