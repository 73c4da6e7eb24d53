"""Open a checkpoint: find its shards, read their headers, and agree them with the index."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from .config import config_path, read_config
from .errors import CheckpointError, raise_if_any
from .header import Entry, Shard, read_shard
from .jsonfile import read_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class Source:
    """A checkpoint whose files agree. path: what the user gave; config: {} if it has none."""

    path: Path
    config: dict[str, Any]
    entries: dict[str, Entry]
    shards: dict[Path, Shard]


def open_source(path: str | os.PathLike[str], outcome: str = "the model is unchanged") -> Source:
    """path: a directory or a .safetensors file. Raises CheckpointError listing what is broken.

    outcome: how the error ends, what became of the caller's work.
    """
    path = Path(path)
    config = read_config(path) if config_path(path).exists() else {}
    shards: list[Shard] = []
    problems: list[str] = []
    weight_map, files = _locate(path, problems)
    for file in files:
        try:
            shards.append(read_shard(file))
        except CheckpointError as error:
            problems.append(str(error))
    entries = _merge(shards, problems)
    if len(shards) == len(files):
        problems += _index_problems(path, weight_map, entries)
    raise_if_any(problems, f"checkpoint {path} is broken; {outcome}")
    return Source(path, config, entries, {shard.path: shard for shard in shards})


def _locate(path: Path, problems: list[str]) -> tuple[dict[str, str], list[Path]]:
    """(weight_map of the index, the shard files); weight_map is empty without an index."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path}: must be a directory or a .safetensors file")
        return {}, [path]
    index, single = path / INDEX_NAME, path / SINGLE_NAME
    if index.exists() and single.exists():
        raise CheckpointError(
            f"{path}: holds both {INDEX_NAME} and {SINGLE_NAME}; remove one, or give the path of "
            f"{SINGLE_NAME} itself"
        )
    if single.exists():
        return {}, [single]
    if not index.exists():
        raise CheckpointError(f"{path}: holds neither {INDEX_NAME} nor {SINGLE_NAME}")
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must map keys to files, got {weight_map!r}")
    for key, name in weight_map.items():
        if not _is_inside(name):
            problems.append(f"{key} in {index}: its file must lie in the directory, got {name!r}")
    names = dict.fromkeys(name for name in weight_map.values() if _is_inside(name))
    return weight_map, [path / name for name in names]


def _is_inside(name: object) -> bool:
    """Judged by spelling alone: hub caches hold symbolic links, which may point anywhere."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    parts = (*PurePosixPath(name).parts, *PureWindowsPath(name).parts)
    return ".." not in parts and not PurePosixPath(name).root and not PureWindowsPath(name).anchor


def _merge(shards: Iterable[Shard], problems: list[str]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for shard in shards:
        for entry in shard.entries:
            if entry.key in entries:
                first = entries[entry.key].file
                problems.append(f"{entry}: the same key is in {first}; delete one of the two")
            else:
                entries[entry.key] = entry
    return entries


def _index_problems(path: Path, weight_map: dict[str, str], entries: dict[str, Entry]) -> list[str]:
    """What the index promises and its shards lack; a key that only a shard knows is no problem."""
    return [
        f"{key}: {INDEX_NAME} places it in {path / name}, which does not hold it"
        for key, name in weight_map.items()
        if _is_inside(name) and (key not in entries or entries[key].file != path / name)
    ]
