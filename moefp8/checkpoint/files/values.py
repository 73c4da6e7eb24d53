"""Count what tensors hold, such as scales that are no numbers: few reads, bounded memory.

A batch is up to 4 MiB of one dtype, from anywhere: to test a thousand small tensors costs as much
as to test one. A run is what one read fetches of it: bytes of one file, without holes, since files
store the scales of many weights side by side.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ...progress import Progress
from ..errors import failing_as
from .header import TORCH_DTYPES, Entry
from .reading import Files, read_into

_NUM_THREADS = 4
_BATCH_BYTES = 4 << 20
_SERIAL = 32768  # so few elements stay in this thread; those of PyTorch would wait for cores

Test = Callable[[torch.Tensor], torch.Tensor]
Counts = dict[str, Counter[Entry]]


def not_finite(scales: torch.Tensor) -> torch.Tensor:
    """Find NaN and infinity; E8M0's code 255 is NaN."""
    return ~scales.float().isfinite()


def not_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Find what is positive and finite, but not 2**n: E8M0 cannot hold it."""
    values = scales.float()
    return (torch.frexp(values).mantissa != 0.5) & values.isfinite() & (values > 0)


SCALE_TESTS: Mapping[str, Test] = {
    "not finite": not_finite,
    "zero": lambda scales: scales.float() == 0,
    "negative": lambda scales: scales.float() < 0,
    "no power of two": not_power_of_two,
}
WEIGHT_TESTS: Mapping[str, Test] = {  # 0x7F and 0xFF are the only NaNs of E4M3
    "NaN": lambda weights: weights.view(torch.uint8).bitwise_and(0x7F) == 0x7F,
}


@dataclass
class _Run:
    """Bytes [begin, end) of a file, which come to byte `at` of the batch. entry: its first one."""

    entry: Entry
    begin: int
    end: int
    at: int


@dataclass
class _Batch:
    """pieces: entries, or parts of them, in the order of the runs, and their numbers of bytes."""

    pieces: list[tuple[Entry, int]] = field(default_factory=list)
    runs: list[_Run] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, entry: Entry, begin: int, end: int) -> None:
        last = self.runs[-1] if self.runs else None
        if last is not None and last.entry.file == entry.file and last.end == begin:
            last.end = end
        else:
            self.runs.append(_Run(entry, begin, end, self.num_bytes))
        self.pieces.append((entry, end - begin))
        self.num_bytes += end - begin


def count_values(
    entries: Iterable[Entry], files: Files, tests: Mapping[str, Test], bar: Progress | None = None
) -> Counts:
    """Count the elements of each entry that pass each test; entries without any are left out.

    entries: tensors of known dtypes, in open files. tests: name -> function of a flat tensor of
    the stored dtype that gives as many bools. bar: it is advanced by bytes.
    Raises CheckpointError if reading fails, naming key and file.
    """
    found: Counts = {name: Counter() for name in tests}
    with ThreadPoolExecutor(_NUM_THREADS, "moefp8-values") as pool:
        for batch in _batches(entries):
            values = _read(batch, files, pool)
            for name, test in tests.items():
                passed = [test(part) for part in values.split(_SERIAL)]
                if any(part.any() for part in passed):
                    _count(torch.cat(passed), batch, values.itemsize, found[name])
            if bar is not None:
                bar.advance(batch.num_bytes)
    return found


def _batches(entries: Iterable[Entry]) -> Iterator[_Batch]:
    batch = _Batch()
    for entry in sorted(entries, key=lambda entry: (entry.dtype, str(entry.file), entry.begin)):
        for begin in range(entry.begin, entry.end, _BATCH_BYTES):
            end = min(begin + _BATCH_BYTES, entry.end)
            is_full = batch.num_bytes + end - begin > _BATCH_BYTES
            if batch.pieces and (is_full or batch.pieces[0][0].dtype != entry.dtype):
                yield batch
                batch = _Batch()
            batch.add(entry, begin, end)
    if batch.pieces:
        yield batch


def _read(batch: _Batch, files: Files, pool: ThreadPoolExecutor) -> torch.Tensor:
    """Read all of batch, flat, by several threads: a disk may be far away."""
    data = torch.empty(batch.num_bytes, dtype=torch.uint8, device="cpu")  # whatever the default

    def read(runs: list[_Run]) -> None:
        for run in runs:
            with failing_as(run.entry, "reading failed", "the model is unchanged"):
                target = data[run.at : run.at + run.end - run.begin]
                read_into(files[run.entry.file], run.begin, target)

    list(pool.map(read, (batch.runs[i::_NUM_THREADS] for i in range(_NUM_THREADS))))
    return data.view(TORCH_DTYPES[batch.pieces[0][0].dtype])


def _count(passed: torch.Tensor, batch: _Batch, itemsize: int, found: Counter[Entry]) -> None:
    each = accumulate(num_bytes // itemsize for _, num_bytes in batch.pieces)
    ends = torch.tensor(list(each), device="cpu")
    upto = passed.cumsum(0)[ends - 1].tolist()
    for (entry, _), before, now in zip(batch.pieces, [0, *upto], upto, strict=False):
        if now > before:
            found[entry] += now - before
