"""Tell what a checkpoint holds and what is wrong with it, without a model."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...progress import Progress
from ..errors import CheckpointError
from ..files.header import FP8, SCALE_DTYPES, Entry
from ..files.names import folded
from ..files.reading import open_files
from ..files.source import scan_source
from ..files.values import SCALE_TESTS, WEIGHT_TESTS, Counts, Test, count_values
from .anomalies import Anomaly, error, fold
from .contents import Contents, Kind, contents_of, kinds_of
from .family import Family, family_of
from .header_checks import check_headers

_REFUSED = "not finite"  # what the other SCALE_TESTS find is loaded as it is
_POWERS = "no power of two"


@dataclass(frozen=True)
class Amount:
    """The number of tensors of one dtype, in one file, or left out together."""

    name: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Inspection:
    """path: what the user gave; dtypes, files, left_out: what there is of each.

    left_out: what a load leaves out by itself, such as MTP layers; kinds hold all else.
    anomalies: errors first.
    """

    path: str
    family: Family
    kinds: tuple[Kind, ...]
    left_out: tuple[Amount, ...]
    dtypes: tuple[Amount, ...]
    files: tuple[Amount, ...]
    anomalies: tuple[Anomaly, ...]

    @property
    def is_fp8(self) -> bool:
        """Whether it holds weights in FP8; codes without scales are an error besides."""
        return any(amount.name == FP8 for amount in self.dtypes)

    @property
    def is_loadable(self) -> bool:
        """Whether nothing was found that load_checkpoint refuses in a model that fits."""
        return all(anomaly.severity != "error" for anomaly in self.anomalies)


def inspect_checkpoint(
    path: str | os.PathLike[str], *, weights: bool = False, progress: bool | None = None
) -> Inspection:
    """Read headers, config.json and all scales; go on with what is whole if something is broken.

    path: as in load_checkpoint. weights: read all FP8 weights too, and look for NaN.
    progress: show a bar on stderr for weights; None means if it is a terminal.
    Raises CheckpointError if there is nothing at path that could be a checkpoint.
    """
    contents = contents_of(scan_source(path))
    entries = list(contents.scan.source.entries.values())
    left_out = [entry for entry in entries if contents.is_left_out(entry)]
    anomalies = [*check_headers(contents), *_check_values(contents, weights, progress)]
    return Inspection(
        str(path),
        family_of(contents),
        kinds_of(contents),
        _amounts((_layer_name(entry.key), entry) for entry in left_out),
        _amounts((entry.dtype, entry) for entry in entries),
        _amounts((str(entry.file), entry) for entry in entries),
        fold(anomalies),
    )


def _amounts(named: Iterable[tuple[str, Entry]]) -> tuple[Amount, ...]:
    """Sum up entries by name, in the order of names."""
    groups: dict[str, list[Entry]] = {}
    for name, entry in named:
        groups.setdefault(name, []).append(entry)
    return tuple(
        Amount(name, len(some), sum(entry.num_bytes for entry in some))
        for name, some in sorted(groups.items())
    )


def _layer_name(key: str) -> str:
    """Name the layer of a key that is left out, `model.layers.61.*` or `mtp.*`, or its table."""
    if key.endswith("rotary_emb.inv_freq"):
        return folded(key)
    parts = key.split(".")
    end = parts.index("layers") + 2 if "layers" in parts else 1
    return ".".join([*parts[:end], "*"])


def _check_values(contents: Contents, weights: bool, progress: bool | None) -> Iterator[Anomaly]:
    """Check file by file, so that a file that cannot be read hides nothing of the others."""
    scales = [entry for entry in contents.scales.values() if entry.dtype in SCALE_DTYPES]
    tests = dict(SCALE_TESTS)
    if not contents.has_power_of_two_scales():
        del tests[_POWERS]
    yield from _check(contents, scales, tests, None)
    if weights:
        data = [entry for entry in contents.weights.values() if entry.dtype == FP8]
        total = sum(entry.num_bytes for entry in data)
        with Progress("reading weights", total, "GiB", 2**30, progress) as bar:
            yield from _check(contents, data, WEIGHT_TESTS, bar)


def _check(
    contents: Contents, entries: list[Entry], tests: Mapping[str, Test], bar: Progress | None
) -> Iterator[Anomaly]:
    what = "weights" if tests is WEIGHT_TESTS else "scales"
    found: Counts = {name: Counter() for name in tests}
    by_file: dict[Path, list[Entry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    for file, some in by_file.items():
        try:
            with ExitStack() as stack:
                files = open_files(stack, some, contents.scan.source.shards)
                counts = count_values(some, files, tests, bar)
        except CheckpointError as problem:
            yield error("the file is broken", str(file), str(problem))
            continue
        for name in tests:
            found[name].update(counts[name])
    kinds = {entry: (folded(entry.key), contents.is_left_out(entry)) for entry in entries}
    for name in tests:
        yield from _told(f"{what}: {name}", kinds, found[name], name == _REFUSED)


def _told(
    rule: str, kinds: Mapping[Entry, tuple[str, bool]], counts: Mapping[Entry, int], refused: bool
) -> Iterator[Anomaly]:
    """Yield an anomaly for each tensor of a kind of which one is in counts.

    All are yielded, so that of_values, when they are folded, counts the whole kind.

    kinds: tensor -> folded name, and whether a load leaves it out.
    """
    at_fault = {kinds[entry] for entry in counts}
    for entry, (kind, is_left_out) in kinds.items():
        if (kind, is_left_out) not in at_fault:
            continue
        num, num_all = counts.get(entry, 0), math.prod(entry.shape)
        severity = "error" if refused and not is_left_out else "note"
        examples = (f"{entry}: {num} of {num_all}",) if num else ()
        yield Anomaly(severity, rule, kind, examples, int(num > 0), num, num_all)
