"""Time calls back to back, without rest: what is left of a GPU's clock at its power limit.

All calls take turns in random order, each turn lasts a second unless told, and nothing flushes L2:
calls rotate over copies of their operands and results that together hold several times what L2
does. A turn replays a CUDA graph of many calls, so that no host is too slow; what cannot be
captured is called one by one. Calls of less than 50 us gain nothing from rest, and are not timed
like this.

What limits the power of an H100 answers late, and too much: for 0.7 s a GPU that had rested draws
790 W of 700, then its clock falls from 1350 to 1010 MHz, and it swings with a period of about a
second, less each time. In turns of 0.3 s, whoever came next paid for that. So all turns follow
seconds of the same load, and each should last a period.
"""

import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.peers import first_line
from benchmarks.sensors import Sensors
from benchmarks.timing import Call, captured

LEAST_US = 50.0  # shorter calls are timed with pauses alone
ROUNDS, SECONDS = 5, 1.0
LEAST_BYTES = 256 << 20  # of all copies together: five times what L2 of an H100 or H200 holds
_LEAD_IN_SECONDS = 0.05  # how a turn begins is not timed: its first loops follow those of another
SETTLING_SECONDS = 3.0  # before the first turn, for the clock to swing less
_LOOP_US = 2000.0  # far longer than it takes the host to launch the next one
_AHEAD = 3  # loops that wait on the device


def num_copies(num_bytes: int) -> int:
    """How many copies of operands and results of so many bytes no cache holds."""
    return ceil(LEAST_BYTES / num_bytes)


class Loop(NamedTuple):
    """`run` makes `num_calls` calls, one after the other.

    kept: what a graph reads, which knows addresses alone.
    """

    run: Call
    num_calls: int
    kept: Sequence[Call] = ()

    @property
    def is_captured(self) -> bool:
        """Whether `run` replays a graph, so that no host is waited for."""
        return bool(self.kept)

    @classmethod
    def over(cls, calls: Sequence[Call], us: float, *, captures: bool = True) -> "Loop":
        """Calls of about `us` each, in turns; as a CUDA graph if that is wanted and possible."""
        repeats = ceil(_LOOP_US / (max(us, LEAST_US) * len(calls)))
        results: list[object] = [None] * len(calls)

        def run() -> None:
            for _ in range(repeats):
                for i, call in enumerate(calls):
                    results[i] = call()  # it lives until its next turn: memory rotates, too

        if captures:
            try:
                return cls(captured(run), repeats * len(calls), calls)
            except Exception as error:
                print(f"no CUDA graph, so the host counts: {first_line(error)}", flush=True)
        return cls(run, repeats * len(calls))


class Mark(Protocol):
    """A place in a stream of work: a `torch.cuda.Event` that was recorded."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Any) -> float: ...


class Turn(NamedTuple):
    """us: of one call; started, ended: by `time.perf_counter`."""

    us: float
    started: float
    ended: float


def recorded() -> Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def turn_of(loop: Loop, seconds: float, mark: Callable[[], Mark] = recorded) -> Turn:
    """Loops back to back for at least `seconds`, some of which the host launches ahead."""
    ahead: deque[Mark] = deque()

    def launched() -> Mark:
        loop.run()
        return mark()

    def run_for(start: Mark, least: float) -> tuple[Mark, int]:
        """The end of the first loop that ends `least` seconds or more after `start`."""
        count = 0
        while True:
            ahead.append(launched())
            end = ahead.popleft()
            end.synchronize()
            count += 1
            if start.elapsed_time(end) >= least * 1e3:
                return end, count

    first = mark()
    ahead.extend(launched() for _ in range(_AHEAD))
    start, _ = run_for(first, _LEAD_IN_SECONDS)
    started = time.perf_counter()
    end, count = run_for(start, seconds - _LEAD_IN_SECONDS)
    us = start.elapsed_time(end) * 1e3 / (count * loop.num_calls)
    return Turn(us, started, time.perf_counter())


TakeTurn = Callable[[Loop, float], Turn]


def turns_of(
    loops: Mapping[str, Loop], rounds: int, seconds: float, take_turn: TakeTurn = turn_of
) -> dict[str, list[Turn]]:
    """A turn of each in every round, in an order drawn anew; before these, one without a time."""
    order = random.Random(0)
    turns: dict[str, list[Turn]] = {name: [] for name in loops}
    gc.collect()
    gc.disable()
    try:
        for loop in loops.values():
            take_turn(loop, SETTLING_SECONDS / len(loops))
        for _ in range(rounds):
            for name in order.sample(list(loops), len(loops)):
                turns[name].append(take_turn(loops[name], seconds))
    finally:
        gc.enable()
    return turns


def without_rest(
    loops: Mapping[str, Loop],
    ours: str,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    *,
    take_turn: TakeTurn = turn_of,
    sensors: Sensors | None = None,
) -> dict[str, dict[str, float]]:
    """Of each: "us", the median over rounds, and where they can be read "mhz" and "watts".

    Of all but `ours` also "ratio", how many times as long as ours in the same round they take: the
    median over rounds, and "least" and "most".
    """
    with sensors or Sensors() as read:
        turns = turns_of(loops, rounds, seconds, take_turn)
    found: dict[str, dict[str, float]] = {}
    for name, of_name in turns.items():
        found[name] = {"us": round(statistics.median(turn.us for turn in of_name), 3)}
        if name != ours and ours in turns:
            ratios = [a.us / b.us for a, b in zip(of_name, turns[ours], strict=True)]
            spread = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
            found[name] |= {key: round(ratio, 4) for key, ratio in spread.items()}
        readings = [read.between(turn.started, turn.ended) for turn in of_name]
        for key in ("mhz", "watts"):
            if seen := [reading[key] for reading in readings if key in reading]:
                found[name][key] = round(statistics.fmean(seen))
    return found
