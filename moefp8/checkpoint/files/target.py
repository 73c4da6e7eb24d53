"""The directory that a checkpoint is written into: its path, its shards and its index."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError
from .safe_read import NO_LINK
from .source import INDEX_NAME, SINGLE_NAME

T = TypeVar("T")


def target_of(path: str | os.PathLike[str]) -> Path:
    """Make path absolute. Raises CheckpointError if a directory cannot be renamed to it."""
    try:
        target = Path(os.path.abspath(path))
        with suppress(FileNotFoundError, NotADirectoryError):
            target.lstat()  # else a NUL would raise only when something is made
        if target.is_symlink() or os.path.ismount(target):
            raise CheckpointError(
                f"{path}: must not be a link or a mount point; name a path below it"
            )
    except (OSError, ValueError) as error:  # ValueError: a NUL, a lone surrogate
        raise CheckpointError(f"{os.fspath(path)!r}: cannot be written ({error})") from error
    return target


def check_free(path: Path) -> None:
    """Raise CheckpointError if path exists, unless it is an empty directory."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path}: exists and is not an empty directory; save elsewhere")


def in_shards(
    items: Iterable[T], num_bytes_of: Callable[[T], int], max_bytes: int
) -> Iterator[list[T]]:
    """Yield shards of items, in their order; there is at least one shard."""
    shard: list[T] = []
    size = 0
    for item in items:
        num_bytes = num_bytes_of(item)
        if shard and size + num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += num_bytes
    yield shard


def shard_name(number: int, num_shards: int) -> str:
    """Name shard `number`, which counts from 1."""
    if num_shards == 1:
        return SINGLE_NAME
    return f"model-{number:05}-of-{num_shards:05}.safetensors"


def write_index(directory: Path, weight_map: dict[str, str], num_bytes: int) -> None:
    """Write the index of weight_map, key -> shard, unless there is one shard alone."""
    if set(weight_map.values()) - {SINGLE_NAME}:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        write_json(directory / INDEX_NAME, index)


def write_json(path: Path, value: dict[str, Any]) -> None:
    with open(path, "w", opener=lambda path, flags: os.open(path, flags | NO_LINK, 0o666)) as file:
        file.write(json.dumps(value, indent=2) + "\n")
