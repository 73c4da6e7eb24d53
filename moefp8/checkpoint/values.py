"""Count what tensors hold, such as scales that are no numbers: few reads, bounded memory.

A span is what one read fetches: up to 4 MiB of one file and one dtype, without holes. Files
store the scales of many weights side by side, so that most spans are hundreds of tensors.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from moefp8.progress import Progress

from .errors import CheckpointError
from .header import TORCH_DTYPES, Entry
from .read import Files, read_into

_NUM_THREADS = 4
_SPAN_BYTES = 4 << 20

Test = Callable[[torch.Tensor], torch.Tensor]
Counts = dict[str, Counter[Entry]]


def not_finite(scales: torch.Tensor) -> torch.Tensor:
    """NaN or infinite; E8M0's code 255 is NaN."""
    return ~scales.float().isfinite()


def not_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Positive and finite, but not 2**n: E8M0 cannot hold it."""
    values = scales.float()
    return (torch.frexp(values).mantissa != 0.5) & values.isfinite() & (values > 0)


SCALE_TESTS: Mapping[str, Test] = {
    "not finite": not_finite,
    "zero": lambda scales: scales.float() == 0,
    "negative": lambda scales: scales.float() < 0,
    "no power of two": not_power_of_two,
}
WEIGHT_TESTS: Mapping[str, Test] = {  # of E4M3, whose only NaNs are these two codes
    "NaN": lambda weights: weights.view(torch.uint8).bitwise_and(0x7F) == 0x7F,
}


@dataclass
class _Span:
    """pieces: entries, or parts of them, and how many elements of each; they follow one another."""

    begin: int
    end: int
    pieces: list[tuple[Entry, int]] = field(default_factory=list)

    @property
    def first(self) -> Entry:
        return self.pieces[0][0]


def count_values(
    entries: Iterable[Entry], files: Files, tests: Mapping[str, Test], bar: Progress | None = None
) -> Counts:
    """How many elements of each entry pass each test; entries without any are left out.

    entries: of known dtypes, in open files. tests: name -> function of a flat tensor of the stored
    dtype that gives as many bools. bar: advanced by bytes.
    Raises CheckpointError if reading fails, naming key and file.
    """
    spans = _spans(entries)
    stop = threading.Event()
    total: Counts = {name: Counter() for name in tests}

    def work(mine: list[_Span]) -> Counts:
        found: Counts = {name: Counter() for name in tests}
        for span in mine:
            if stop.is_set():
                break
            _count_span(span, files, tests, found)
            if bar is not None:
                bar.advance(span.end - span.begin)
        return found

    with ThreadPoolExecutor(_NUM_THREADS, "moefp8-values") as pool:
        try:
            for found in pool.map(work, (spans[i::_NUM_THREADS] for i in range(_NUM_THREADS))):
                for name, counts in found.items():
                    total[name].update(counts)
        finally:
            stop.set()  # also on Ctrl-C: the pool waits for its threads
    return total


def _spans(entries: Iterable[Entry]) -> list[_Span]:
    spans: list[_Span] = []
    for entry in sorted(entries, key=lambda entry: (str(entry.file), entry.begin)):
        itemsize = TORCH_DTYPES[entry.dtype].itemsize
        for begin in range(entry.begin, entry.end, _SPAN_BYTES):
            end = min(begin + _SPAN_BYTES, entry.end)
            last = spans[-1] if spans else None
            if last is None or not _continues(last, entry, begin, end):
                last = _Span(begin, begin)
                spans.append(last)
            last.pieces.append((entry, (end - begin) // itemsize))
            last.end = end
    return spans


def _continues(span: _Span, entry: Entry, begin: int, end: int) -> bool:
    """Whether bytes [begin, end) of entry can be read along with span."""
    is_alike = (span.first.file, span.first.dtype) == (entry.file, entry.dtype)
    return is_alike and span.end == begin and end - span.begin <= _SPAN_BYTES


@torch.inference_mode()
def _count_span(span: _Span, files: Files, tests: Mapping[str, Test], found: Counts) -> None:
    try:
        data = torch.empty(span.end - span.begin, dtype=torch.uint8)
        read_into(files[span.first.file], span.begin, data)
    except (OSError, EOFError, RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{span.first}: reading failed ({error}); the model is unchanged"
        ) from error
    values = data.view(TORCH_DTYPES[span.first.dtype])
    ends = list(accumulate(length for _, length in span.pieces))
    for name, test in tests.items():
        passed = test(values)
        if not passed.any():
            continue
        upto = passed.cumsum(0)[torch.tensor(ends) - 1].tolist()
        for (entry, _), before, now in zip(span.pieces, [0, *upto], upto, strict=False):
            if now > before:
                found[name][entry] += now - before
