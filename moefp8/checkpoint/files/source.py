"""Open a checkpoint: find its shards, read their headers, and compare them with the index."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from ..errors import CheckpointError, failing_as, quoted, raise_if_any
from .config import (
    config_path,
    format_name,
    format_problem,
    modelopt_quantization,
    quantization_of,
)
from .header import FP8, PLAIN_DTYPES, Entry, Shard, read_shard
from .safe_read import check_inside, check_key, check_there, read_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_FILES = 10_000  # DeepSeek-V3 has 163
_MAX_NAME = 1000
_MAX_DOUBLES = 100  # keys of one file that are listed one by one

_T = TypeVar("_T")
_Problems = defaultdict[Path, list[str]]
_Placed = dict[str, Path | None]  # key -> its file by the index; None if that name is not allowed


@dataclass(frozen=True)
class Source:
    """A checkpoint whose files agree. path: what the user gave; config: {} if it has none.

    If config.json has no quantization, config has that of modelopt's file.
    """

    path: Path
    config: dict[str, Any]
    entries: dict[str, Entry]
    shards: dict[Path, Shard]


@dataclass(frozen=True)
class Scan:
    """The readable part of a checkpoint. named: keys of headers and index; problems: by file."""

    source: Source
    named: frozenset[str]
    problems: dict[Path, list[str]]


def open_source(path: str | os.PathLike[str], outcome: str = "the model is unchanged") -> Source:
    """Open a directory or a .safetensors file. CheckpointError ends with outcome."""
    return _whole(scan_source(path), outcome)


def open_shards(files: Sequence[Path]) -> Source:
    """Open the checkpoint of these files; the caller has checked the targets of their links."""
    path = files[0] if len(files) == 1 else files[0].parent
    return _whole(_scan(path, {}, files, None, defaultdict(list)), "no model was made")


def _whole(scan: Scan, outcome: str) -> Source:
    each = list(scan.problems.values())
    problems = [some[0] for some in each] + [problem for some in each for problem in some[1:]]
    raise_if_any(problems, f"checkpoint {scan.source.path} is broken; {outcome}")
    return scan.source


def scan_source(path: str | os.PathLike[str]) -> Scan:
    """Read all that is intact. Raises CheckpointError if nothing at path can be a checkpoint."""
    path = Path(path)
    problems: _Problems = defaultdict(list)
    with failing_as(path, "cannot be read"):
        home = path if path.is_dir() else None
        return _scan(path, *_locate(path, problems), home, problems)


def _scan(
    path: Path, placed: _Placed, files: Iterable[Path], home: Path | None, problems: _Problems
) -> Scan:
    """Read all that is intact. home: the directory that must hold all files, by real path."""
    has_config = os.path.lexists(config_path(path))
    config = _try(read_object, config_path(path), problems) if has_config else None
    shards = {x.path: x for x in _read_shards(files, home, problems)}
    for shard in shards.values():
        problems[shard.path] += shard.problems
    entries = _merge(shards.values(), problems)
    named = frozenset(placed).union(*(shard.named for shard in shards.values()))
    problems[path / INDEX_NAME] += [  # a key that only a shard knows is fine
        f"{key}: {INDEX_NAME} places it in {file}, which does not hold it"
        for key, file in placed.items()
        if file in shards and key not in shards[file].named
    ]
    config = config or {}
    is_plain = all(entry.dtype in PLAIN_DTYPES for entry in entries.values())
    if not is_plain and quantization_of(config) is None:
        quantization = _try(modelopt_quantization, path, problems)
        config |= {"quantization_config": quantization} if quantization else {}
    source = Source(path, config, entries, shards)
    return Scan(source, named, {file: some for file, some in problems.items() if some})


def _read_shards(files: Iterable[Path], home: Path | None, problems: _Problems) -> Iterator[Shard]:
    """Yield the files that can be read, each once; with home, only files in it."""
    names: dict[tuple[int, int], Path] = {}

    def read(file: Path) -> Shard:
        if home is not None:
            check_inside(file, home)
        with suppress(OSError):  # read_shard reports it
            status = file.stat()
            first = names.setdefault((status.st_dev, status.st_ino), file)
            if first is not file:
                raise CheckpointError(f"{file}: is the same file as {first}; remove one of the two")
        return read_shard(file)

    for file in files:
        if shard := _try(read, file, problems):
            yield shard


def _try(read: Callable[[Path], _T], file: Path, problems: _Problems) -> _T | None:
    try:
        return read(file)
    except CheckpointError as error:
        problems[file].append(str(error))
        return None


def _locate(path: Path, problems: _Problems) -> tuple[_Placed, Iterable[Path]]:
    """Return (key -> file by the index, or {} if there is none to read; the shard files)."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path}: must be a directory or a .safetensors file")
        return {}, [path]
    index, single = path / INDEX_NAME, path / SINGLE_NAME
    if not os.path.lexists(index):
        if single.exists():
            return {}, [single]
        check_there(path)
        raise CheckpointError(f"{path}: holds neither {INDEX_NAME} nor {SINGLE_NAME}")
    if single.exists():
        problems[path].append(
            f"{path}: holds both {INDEX_NAME} and {SINGLE_NAME}; remove one, or give the path of "
            f"{SINGLE_NAME} itself"
        )
    weight_map = _try(_weight_map, index, problems)
    if weight_map is None:
        return {}, sorted(path.glob("*.safetensors"))
    names = dict.fromkeys(name for name in weight_map.values() if isinstance(name, str))
    files = {name: path / name for name in names if _is_inside(name)}
    placed = {
        key: files.get(name) if isinstance(name, str) else None for key, name in weight_map.items()
    }
    problems[index] += [
        f"{key} in {index}: its file must lie in the directory, got {quoted(weight_map[key])}"
        for key, file in placed.items()
        if file is None
    ]
    return placed, dict.fromkeys(files.values())


def _weight_map(index: Path) -> dict[str, Any]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map must map keys to files, got {quoted(weight_map)}"
        )
    for key in weight_map:
        check_key(key, str(index))
    num_files = len({name for name in weight_map.values() if isinstance(name, str)})
    if num_files > _MAX_FILES:
        raise CheckpointError(f"{index}: names {num_files:,} files, and may {_MAX_FILES:,}")
    return weight_map


def _is_inside(name: str) -> bool:
    """Whether name, by its spelling, stays in the directory; `_read_shards` checks links."""
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        return False
    paths = PurePosixPath(name), PureWindowsPath(name)
    return not any(path.anchor or ".." in path.parts for path in paths)


def _merge(shards: Iterable[Shard], problems: _Problems) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for shard in shards:
        doubles = [entry for entry in shard.entries if entry.key in entries]
        problems[shard.path] += [
            f"{entry}: the same key is in {entries[entry.key].file}; delete one of the two"
            for entry in doubles[:_MAX_DOUBLES]
        ]
        if num_more := len(doubles[_MAX_DOUBLES:]):
            problems[shard.path].append(f"{shard.path}: has {num_more:,} more such keys")
        for entry in shard.entries:
            entries.setdefault(entry.key, entry)
    return entries


def disagreement(source: Source, entries: Iterable[Entry]) -> str | None:
    """Say how the dtypes of entries contradict the format in config.json; None if they do not.

    A single shard of several may hold no quantized tensor.
    """
    problem = format_problem(source.config)
    if problem and any(entry.dtype not in PLAIN_DTYPES for entry in entries):
        return problem
    dtypes = {entry.dtype for entry in source.entries.values()}
    is_plain = dtypes <= set(PLAIN_DTYPES)
    is_quantized = not is_plain if problem else FP8 in dtypes  # our formats store E4M3
    is_part = source.path.is_file() and source.path.name != SINGLE_NAME
    if is_part or is_quantized or not dtypes or not quantization_of(source.config):
        return None
    way_out = (
        "these weights are not quantized: load or quantize them from a directory whose config.json "
        "states no format"
        if is_plain
        else "quantize the 16-bit original (python -m moefp8 quantize), or fetch its FP8 release "
        "in 128x128 blocks"
    )
    return (
        f"config.json says {format_name(source.config)}, but no tensor is "
        f"{'quantized' if problem else FP8}: dtypes are {', '.join(sorted(dtypes))}; {way_out}"
    )


def kept_entries(source: Source, ignore: Iterable[str]) -> dict[str, Entry]:
    """Return the entries whose keys match no pattern of ignore. Raises TypeError for a str."""
    if isinstance(ignore, str):  # its characters would be patterns, and '*' matches everything
        raise TypeError(f"ignore must be an iterable of patterns, got the str {ignore!r}")
    patterns = tuple(ignore)
    return {
        key: entry
        for key, entry in source.entries.items()
        if not any(fnmatchcase(key, pattern) for pattern in patterns)
    }
