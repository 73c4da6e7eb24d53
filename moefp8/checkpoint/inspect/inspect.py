"""List what a checkpoint holds and what is wrong with it, without a model."""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ...system.progress import Progress
from ..errors import CheckpointError
from ..files.config import says_separate
from ..files.cuts import are_separate
from ..files.header import FP8, SCALE_DTYPES, Entry
from ..files.names import folded, weight_of_scale
from ..files.reading import open_files
from ..files.source import scan_source
from ..files.values import SCALE_TESTS, WEIGHT_TESTS, Counts, Test, count_values
from .anomalies import Anomaly, fold
from .contents import Contents, Kind, contents_of, grid_of, is_ambiguous, kinds_of
from .family import Family, family_of
from .header_checks import check_headers


@dataclass(frozen=True)
class Amount:
    """The number of tensors of one dtype, in one file, or left out together."""

    name: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Inspection:
    """path: the user's; dtypes, files: the tensors of each, summed up.

    left_out: tensors that a load leaves out by itself, such as MTP layers; kinds have all others.
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
        """Whether there are weights in FP8; without scales they are also an error."""
        weights = (kind for kind in self.kinds if weight_of_scale(kind.name) is None)
        return any(FP8 in kind.dtypes for kind in weights)

    @property
    def is_loadable(self) -> bool:
        """Whether load_checkpoint would accept it for a model that fits."""
        return all(anomaly.severity != "error" for anomaly in self.anomalies)


def inspect_checkpoint(
    path: str | os.PathLike[str], *, weights: bool = False, progress: bool | None = None
) -> Inspection:
    """Read headers, config.json and all scales; if something is broken, inspect the rest.

    Codes of experts are read where nothing else shows how gate and up were cut into blocks.
    path: as in load_checkpoint. weights: read all FP8 weights too, and look for NaN.
    progress: show a bar on stderr for weights; None means if it is a terminal.
    Raises CheckpointError if there is nothing at path that could be a checkpoint.
    """
    contents = contents_of(scan_source(path))
    entries = contents.scan.source.entries
    anomalies = [*check_headers(contents), *_check_cuts(contents)]
    anomalies += _check_values(contents, weights, progress)
    return Inspection(
        str(path),
        family_of(contents),
        kinds_of(contents),
        _amounts((_layer_name(key), entries[key]) for key in entries if key in contents.left_out),
        _amounts((entry.dtype, entry) for entry in entries.values()),
        _amounts((str(entry.file), entry) for entry in entries.values()),
        fold(anomalies),
    )


def _amounts(named: Iterable[tuple[str, Entry]]) -> tuple[Amount, ...]:
    """Sum up entries by name, in the order of names."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for name, entry in named:
        sizes[name].append(entry.num_bytes)
    return tuple(Amount(name, len(sizes[name]), sum(sizes[name])) for name in sorted(sizes))


def _layer_name(key: str) -> str:
    """Name the layer of a key that is left out, `model.layers.61.*` or `mtp.*`, or its table."""
    if key.endswith("rotary_emb.inv_freq"):
        return folded(key)
    parts = key.split(".")
    end = parts.index("layers") + 2 if "layers" in parts else 1
    return ".".join([*parts[:end], "*"])


def _check_cuts(contents: Contents) -> Iterator[Anomaly]:
    """Find stacks of gate and up whose cut follows from neither config.json, shapes nor codes."""
    if says_separate(contents.config):
        return
    block = contents.block()
    for name, scale in contents.scales.items():
        weight = contents.weights.get(name)
        if weight is None or weight.dtype != FP8 or not is_ambiguous(name, weight.shape, block):
            continue
        if grid_of(name, weight.shape, block) != scale.shape:
            continue  # `check_headers` reports it
        with suppress(CheckpointError), ExitStack() as stack:  # other checks report what is broken
            files = open_files(stack, [weight], contents.scan.source.shards)
            if weight.shape[1] % 2 == 0 and are_separate(weight, files[weight.file]):
                continue
        rule = "scales that do not tell how gate and up were cut into blocks"
        severity = "note" if scale.key in contents.left_out else "error"
        text = f"{scale}: {list(scale.shape)} for {list(weight.shape)} either way"
        yield Anomaly(severity, rule, folded(scale.key), (text,))


def _check_values(contents: Contents, weights: bool, progress: bool | None) -> Iterator[Anomaly]:
    scales = [entry for entry in contents.scales.values() if entry.dtype in SCALE_DTYPES]
    tests = dict(SCALE_TESTS)
    if contents.quantization.get("scale_fmt") != "ue8m0":  # DeepSeek-V3.1 says this, and breaks it
        del tests["no power of two"]
    yield from _check(contents, "scales", scales, tests, None)
    if weights:
        data = [entry for entry in contents.weights.values() if entry.dtype == FP8]
        total = sum(entry.num_bytes for entry in data)
        with Progress("reading weights", total, "GiB", 2**30, progress) as bar:
            yield from _check(contents, "weights", data, WEIGHT_TESTS, bar)


def _check(
    contents: Contents,
    what: str,
    entries: list[Entry],
    tests: Mapping[str, Test],
    bar: Progress | None,
) -> Iterator[Anomaly]:
    """Check file by file, so that a file that cannot be read hides nothing of the others.

    If one tensor of a kind is at fault, each of that kind yields an anomaly: when these are folded,
    of_values counts the whole kind.
    """
    totals: Counts = {name: Counter() for name in tests}
    by_file: dict[Path, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_file[entry.file].append(entry)
    for file, some in by_file.items():
        try:
            with ExitStack() as stack:
                files = open_files(stack, some, contents.scan.source.shards)
                counts = count_values(some, files, tests, bar)
        except CheckpointError as problem:
            yield Anomaly("error", "the file is broken", str(file), (str(problem),))
            continue
        for name in tests:
            totals[name].update(counts[name])
    kinds = {entry: (folded(entry.key), entry.key in contents.left_out) for entry in entries}
    for name, faults in totals.items():
        at_fault = {kinds[entry] for entry in faults}
        for entry in (entry for entry in entries if kinds[entry] in at_fault):
            kind, is_left_out = kinds[entry]
            # The values that other tests find are loaded as they are.
            severity = "error" if name == "not finite" and not is_left_out else "note"
            num, num_all = faults[entry], math.prod(entry.shape)
            examples = (f"{entry}: {num} of {num_all}",) if num else ()
            rule = f"{what}: {name}"
            yield Anomaly(severity, rule, kind, examples, int(num > 0), num, num_all)
