"""Where the buffers of a record are: two share memory if no step is in the lifetimes of both.

This rests on one rule of all kernels: each waits for the step before it, and only then lets the
next one start. So at most two are unfinished. While a step runs, the next one may only touch what
it touches before it waits, its `early` inputs and buffers.
"""

from typing import NamedTuple

from ..common.blocks import round_up
from .record import Record

_ALIGNMENT = 256


class Placed(NamedTuple):
    """offsets: where each buffer begins. num_bytes: how many bytes all of them take."""

    offsets: dict[str, int]
    num_bytes: int


def lifetimes(record: Record) -> dict[str, tuple[int, int]]:
    """The first and the last step in which each buffer must keep its memory.

    A buffer that a step touches early may be touched while the step before it runs.
    """
    spans: dict[str, tuple[int, int]] = {}
    for i, step in enumerate(record.steps):
        for base in step.touched:
            if base in record.buffers:
                begin = i - 1 if base in step.early and i else i
                first, last = spans.get(base, (begin, i))
                spans[base] = min(first, begin), max(last, i)
    return spans


def place(record: Record) -> Placed:
    """Place the largest buffer first, each at the lowest place that is free in its lifetime.

    In the order of their first use, buffers were measured to take up to 1.5 times as much.
    """
    spans, offsets, num_bytes = lifetimes(record), dict[str, int](), 0
    rooms: list[tuple[int, int, int, int]] = []  # begin, end, first and last step
    for name in sorted(spans, key=lambda x: -record.buffers[x]):
        size, (first, last) = record.buffers[name], spans[name]
        begin = 0
        for low, high, since, until in sorted(rooms):
            if since <= last and first <= until:
                if begin + size <= low:
                    break
                begin = max(begin, round_up(high, _ALIGNMENT))
        rooms.append((begin, begin + size, first, last))
        offsets[name] = begin
        num_bytes = max(num_bytes, begin + size)
    return Placed(offsets, num_bytes)


def check_early(record: Record) -> None:
    """Raise ValueError if a step touches early what may not be written yet.

    The step before it may be unfinished, and so may the stream's previous kernel before the first
    step: that may touch early only what is `older`.
    """
    written: frozenset[str] | None = None  # by the step before; None: by any earlier kernel
    for step in record.steps:
        wrong = step.early - record.older if written is None else step.early & written
        if wrong and step.programmatic:
            raise ValueError(
                f"record: {step.kernel} must wait before it touches what the kernel before it may "
                f"write, got {', '.join(sorted(wrong))} as early"
            )
        written = step.written
