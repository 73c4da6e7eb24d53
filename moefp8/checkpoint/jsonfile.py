"""Parse JSON that others wrote: an object, no key twice, every failure a CheckpointError."""

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .files import read_small


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """text: UTF-8 JSON; where: its name in errors. Raises CheckpointError if no object."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # both decoding errors are ValueErrors
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must be a JSON object, got {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at path, which `read_small` must take."""
    return parse_object(read_small(path), str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"key {key!r} appears twice")
        value[key] = item
    return value
