"""Files that only we write, files that outlast a failure, and locks that one process has."""

import os
import secrets
import stat
from functools import partial
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MAX_BYTES = 16 << 20  # the most that a file read as a whole may have


def make_private(folder: Path) -> None:
    """Make the folder unless it exists, as one that `require_private` accepts. Raises OSError.

    One that exists keeps its mode, and may be on a read-only disk.
    """
    try:
        require_private(folder)
    except FileNotFoundError:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(folder)


def require_private(folder: Path) -> None:
    """Raise OSError unless it is a folder, and one that `require_ours` accepts."""
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is no directory")
    require_ours(folder, status)


def require_ours(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError unless the file is ours or root's, and only its owner may write to it.

    Root may change all of our files anyway, and builds container images.
    """
    if os.name != "posix":
        return
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {path}; chmod go-w it")


def read_ours(path: Path) -> bytes:
    """Return its bytes. Raises OSError if it is missing, never ends, or others may write to it.

    It may have 16 MiB at most.
    """
    with open(path, "rb", opener=_open_plainly) as file:
        status = os.fstat(file.fileno())
        require_ours(path, status)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        if status.st_size > _MAX_BYTES:
            raise OSError(f"{path} has {status.st_size:,} bytes, above {_MAX_BYTES:,}")
        return file.read(status.st_size)


def _open_plainly(path: str, flags: int) -> int:
    """Follow no symbolic link, which may lead anywhere, and do not wait for the end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def publish(path: Path, data: bytes) -> None:
    """Let `path` hold all of `data`, or what it held before. Raises OSError.

    Meanwhile, and for good if the process is killed, data lie beside it, where `leftovers` looks.
    """
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        # Others may read it, if the folder is open to them and unless the umask forbids it. They
        # may never write, as they could under a umask of 002: `read_ours` would refuse it.
        with open(temporary, "xb", opener=partial(os.open, mode=0o644)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # it exists no more, unless something failed


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, outlast a power failure."""
    if os.name != "posix":  # Windows opens no directory
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def leftovers(path: Path) -> list[Path]:
    """What `publish` is writing for that path, or left behind."""
    return list(path.parent.glob(f".{path.stem}.*.tmp"))


def try_lock(lock: Path) -> int:
    """A descriptor that holds the lock until it is closed, be it by this process's death.

    Raises BlockingIOError if another process has it, OSError if nobody can.
    """
    if fcntl is None:
        raise OSError("no lock of a file is to be had on this system")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        # Not flock: its locks are inherited by forked children, which may outlive a killed parent.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 0:
            raise BlockingIOError("its holder has removed it; others lock a new file by now")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
