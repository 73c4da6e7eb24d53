"""Parse JSON that others wrote: an object, no key twice, every failure a CheckpointError.

What would cost more than a file of its size should is refused: a list of nothing takes 2 bytes of
the file and 64 of memory, and what is nested deeply cannot be printed, copied or written again.
"""

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, quoted
from .safe_open import read_small

_MAX_VALUES = 4_000_000  # 150,000 tensors of a header have 1.7 million; these take 5 s and 0.5 GiB
_MAX_DEPTH = 64
_MAX_KEY = 1000


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """text: UTF-8 JSON; where: its name in errors. Raises CheckpointError if no object.

    What is returned nests at most 64 deep, and its strings can be encoded.
    """
    if sum(map(text.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise CheckpointError(f"{where}: must hold at most {_MAX_VALUES:,} values")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        _check_depth(value)
        if b"\\u" in text:  # half of a character can be written in no other way
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # decoding and encoding errors are ValueErrors
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must be a JSON object, got {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at path, which `read_small` must take."""
    return parse_object(read_small(path), str(path))


def check_key(key: str, where: str) -> None:
    """key: of a tensor. Terminals show keys, and obey what cannot be printed."""
    if not key or len(key) > _MAX_KEY or not key.isprintable():
        raise CheckpointError(
            f"{where}: the key of a tensor must be 1 to {_MAX_KEY} printable characters, got "
            f"{quoted(key)}"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"key {quoted(key)} appears twice")
        value[key] = item
    return value


def _check_depth(value: Any) -> None:
    level = [value] if type(value) in (dict, list) else []
    for _ in range(_MAX_DEPTH):
        items = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for some in items for x in some if type(x) in (dict, list)]
        if not level:
            return
    raise ValueError(f"it nests more than {_MAX_DEPTH} deep")
