"""Count the values of tensors that pass a test, such as NaN: few reads, bounded memory.

A batch is up to 4 MiB of one dtype from any files, so a thousand small tensors cost as much as one.
A run is the part of a batch that one read fetches: files store many scales side by side.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from ...system.progress import Progress
from ..errors import failing_as
from .header import TORCH_DTYPES, Entry
from .reading import Files, read_into
from .target import in_shards

_NUM_THREADS = 4
_BATCH_BYTES = 4 << 20
_SERIAL = 32768  # elements; so few stay in this thread, as PyTorch's threads would wait for cores

Test = Callable[[torch.Tensor], torch.Tensor]
Counts = dict[str, Counter[Entry]]


def not_finite(scales: torch.Tensor) -> torch.Tensor:
    """Find NaN and infinity; E8M0's code 255 is NaN."""
    return ~scales.float().isfinite()


def not_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Find positive finite numbers other than 2**n, which E8M0 cannot hold."""
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


class _Piece(NamedTuple):
    """Bytes [begin, end) of the file of entry."""

    entry: Entry
    begin: int
    end: int


def count_values(
    entries: Iterable[Entry], files: Files, tests: Mapping[str, Test], bar: Progress | None = None
) -> Counts:
    """Count the elements of each entry that pass each test; entries without any are left out.

    entries: tensors of known dtypes. tests: name -> function of a flat tensor of the stored dtype
    that returns as many bools. Raises CheckpointError if reading fails, naming key and file.
    """
    counts: Counts = {name: Counter() for name in tests}
    with ThreadPoolExecutor(_NUM_THREADS, "moefp8-values") as pool:
        for batch in _batches(entries):
            values = _read(_runs(batch), files, pool).view(TORCH_DTYPES[batch[0].entry.dtype])
            for name, test in tests.items():
                passed = [test(part) for part in values.split(_SERIAL)]
                if any(part.any() for part in passed):
                    _count(torch.cat(passed), batch, values.itemsize, counts[name])
            if bar is not None:
                bar.advance(values.nbytes)
    return counts


def _batches(entries: Iterable[Entry]) -> Iterator[list[_Piece]]:
    """Yield batches of entries, or parts of them, in the order of their files."""
    ordered = sorted(entries, key=lambda entry: (entry.dtype, str(entry.file), entry.begin))
    for _, same_dtype in groupby(ordered, lambda entry: entry.dtype):
        pieces = (
            _Piece(entry, begin, min(begin + _BATCH_BYTES, entry.end))
            for entry in same_dtype
            for begin in range(entry.begin, entry.end, _BATCH_BYTES)
        )
        batches = in_shards(pieces, lambda piece: piece.end - piece.begin, _BATCH_BYTES)
        yield from filter(None, batches)  # empty tensors have no pieces


def _runs(batch: list[_Piece]) -> list[_Piece]:
    """Join pieces that follow one another in a file; the entry of a run is its first piece's."""
    runs = batch[:1]
    for piece in batch[1:]:
        last = runs[-1]
        if last.entry.file == piece.entry.file and last.end == piece.begin:
            runs[-1] = last._replace(end=piece.end)
        else:
            runs.append(piece)
    return runs


def _read(runs: list[_Piece], files: Files, pool: ThreadPoolExecutor) -> torch.Tensor:
    """Read all runs into one tensor, in their order, by several threads: a disk may be remote."""
    sizes = [run.end - run.begin for run in runs]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")  # whatever the default is
    jobs = list(zip(runs, data.split(sizes), strict=True))

    def read(jobs: list[tuple[_Piece, torch.Tensor]]) -> None:
        for run, target in jobs:
            with failing_as(run.entry, "reading failed", "the model is unchanged"):
                read_into(files[run.entry.file], run.begin, target)

    list(pool.map(read, (jobs[i::_NUM_THREADS] for i in range(_NUM_THREADS))))
    return data


def _count(passed: torch.Tensor, batch: list[_Piece], itemsize: int, count: Counter[Entry]) -> None:
    ends = accumulate((piece.end - piece.begin) // itemsize for piece in batch)
    upto = passed.cumsum(0)[torch.tensor(list(ends), device="cpu") - 1].tolist()
    for piece, before, now in zip(batch, [0, *upto], upto, strict=False):
        if now > before:
            count[piece.entry] += now - before
