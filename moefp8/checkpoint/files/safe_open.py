"""Open files that others wrote: what they are is looked at before a byte is read.

A pipe would be waited for without end, a device may never end, and a link may lead to what its
owner cannot read, but we can.
"""

import os
import stat
from pathlib import Path

from ..errors import CheckpointError

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # to open a file that is to be written
_MAX_BYTES = 100_000_000  # of JSON; an index of 150,000 keys takes 20 MB


def open_regular(path: Path) -> int:
    """A descriptor to read from. Raises OSError; CheckpointError if path is no regular file."""
    waiting = getattr(os, "O_NONBLOCK", 0)  # else a pipe without a writer would be waited for
    file = os.open(path, os.O_RDONLY | waiting | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path}: must be a regular file")
    return file


def read_small(path: Path) -> bytes:
    """All of a file that describes others, such as config.json; it lies in their directory.

    Raises CheckpointError if it is no regular file, larger than 100 MB, a link out of its directory
    or cannot be read.
    """
    check_inside(path, path.parent)
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > _MAX_BYTES:
        raise CheckpointError(f"{path}: must be of at most {_MAX_BYTES:,} bytes")
    return data


def check_inside(path: Path, directory: Path) -> None:
    """A link may lead elsewhere in the directory, or to the blobs of the hub cache it is in.

    Raises CheckpointError for others: what is read may be written to where others read it.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    snapshots = [folder for folder in root.parents if folder.name == "snapshots"]
    if not any(real.is_relative_to(x) for x in (root, *(x.parent / "blobs" for x in snapshots))):
        raise CheckpointError(
            f"{path}: a link out of the checkpoint, to {real}, is not followed; put the file "
            "itself there, or remove the link"
        )
