"""Open files and parse JSON that others wrote, without trusting either.

Pipes and devices may never end, and a link may lead to a file that its owner cannot read: a path
is checked before a byte is read. JSON that costs much is refused: an empty list takes
2 bytes of the file and 64 of memory, and deep nesting cannot be printed, copied or written again.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, failing_as, quoted

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # a flag to open a file that is to be written
_MAX_BYTES = 100_000_000  # an index of 150,000 keys takes 20 MB
_MAX_VALUES = 4_000_000  # 150,000 tensors of a header have 1.7 million; these take 5 s and 0.5 GiB
_MAX_DEPTH = 64
_MAX_KEY = 1000
# A `Path` has one slash where a URL has two. A hub id is `owner/name`.
_HUB_ID = re.compile(r"(https?:/(?:huggingface\.co|hf\.co)/)?(\w[\w.-]*/\w[\w.-]*)")


def open_regular(path: Path) -> int:
    """Return a descriptor to read. Raises OSError; CheckpointError if path is no regular file."""
    no_waiting = getattr(os, "O_NONBLOCK", 0)  # else opening a pipe would wait for a writer
    file = os.open(path, os.O_RDONLY | no_waiting)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path}: must be a regular file")
    return file


def check_there(path: Path) -> None:
    """Raise CheckpointError if there is nothing at path; for a hub id, it says how to download."""
    if os.path.lexists(path):
        return
    hub_id = _HUB_ID.fullmatch(str(path))
    is_remote = hub_id and (hub_id[1] or not os.path.lexists(path.parent))
    way_out = (
        f"; what is on the Hugging Face hub is downloaded first: hf download {hub_id[2]} "
        "--local-dir DIR (pip install huggingface_hub), then give DIR"
        if hub_id and is_remote
        else ""
    )
    raise CheckpointError(f"{path}: there is no such file or directory{way_out}")


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file beside those that it describes, such as config.json.

    Raises CheckpointError if it is no regular file or a link out of its directory, or is too large.
    """
    check_inside(path, path.parent)
    with failing_as(path, "cannot be read"), open(open_regular(path), "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise CheckpointError(f"{path}: must be of at most {_MAX_BYTES:,} bytes")
    return parse_object(data, str(path))


def check_inside(path: Path, directory: Path) -> None:
    """Raise CheckpointError if path is a link out of directory and the hub cache that it is in.

    What is read may be written to where others read it.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    snapshots = [folder for folder in root.parents if folder.name == "snapshots"]
    if not any(real.is_relative_to(x) for x in (root, *(x.parent / "blobs" for x in snapshots))):
        raise CheckpointError(
            f"{path}: a link out of the checkpoint, to {real}, is not followed; put the file "
            "itself there, or remove the link"
        )


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse UTF-8 JSON that errors call `where`. Raises CheckpointError unless it is an object.

    Its keys are unique, it nests at most 64 deep, and its strings can be encoded.
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


def check_key(key: str, where: str) -> None:
    """Raise CheckpointError unless the key of a tensor is short and a terminal can show it."""
    if not key or len(key) > _MAX_KEY or not key.isprintable():
        rule = f"the key of a tensor must be 1 to {_MAX_KEY} printable characters"
        raise CheckpointError(f"{where}: {rule}, got {quoted(key)}")


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
