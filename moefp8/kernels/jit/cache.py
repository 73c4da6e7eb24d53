"""Compiled kernels, kept in memory and in the user's cache folder.

A kernel is one file, named by its key and checked by a checksum. It is code that we run, so no
other user may write to the folder. One atomic rename publishes it, so readers see all of it or
nothing, and a second writer replaces it by the same bytes. The lock of a kernel only saves work:
processes that cannot have it compile the same kernel and publish the same entry.
"""

import itertools
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ...system.files import (
    leftovers,
    make_private,
    publish,
    read_ours,
    require_private,
    try_lock,
)
from ...system.threads import Once
from .cubin import Cubin, JitError

_PATIENCE_S = 60.0  # kernels take 0.1 to 3 s; a process that was stopped may hold its lock for good
_POLL_S = 0.05
_WAY_OUT = "set MOEFP8_CACHE_DIR to a folder of your own, on a disk with space"
_MAX_BYTES = 1 << 30  # a kernel takes 60 KiB: this holds one version's kernels for many models

_memory: Once[str, Cubin] = Once()
_disk_fails = False  # if so, other processes cannot publish either: do not wait for them
_num_warned = itertools.count()  # next() is atomic


def cached(key: str, build: Callable[[], Cubin]) -> Cubin:
    """The cubin of `key`: from memory, else from disk, else built and stored."""
    return _memory.get(key, lambda: _from_disk(key, build))


def keep(cubins: Mapping[str, Cubin]) -> None:
    """Have every cubin on disk under its key. Raises JitError, saying why that cannot be.

    What another process published is not written again, so a read-only disk may hold them.
    """
    max_bytes = max_cache_bytes()
    num_bytes = sum(len(cubin.to_bytes(key)) for key, cubin in cubins.items())
    if 0 < max_bytes < num_bytes:
        raise JitError(
            f"{len(cubins)} compiled kernels take {num_bytes:,} bytes, more than "
            f"MOEFP8_CACHE_MAX_BYTES = {max_bytes:,} keeps on disk; raise it"
        )
    try:
        folder = cache_folder()
        make_private(folder)
        for key, cubin in cubins.items():
            path = folder / f"{key}.cubin"
            if _read(path, key) is None:
                publish(path, cubin.to_bytes(key))
    except (OSError, JitError) as error:
        raise JitError(f"compiled kernels cannot be kept on disk: {error}; {_WAY_OUT}") from error


def cache_folder() -> Path:
    """`MOEFP8_CACHE_DIR`, else the user's cache folder. Raises JitError if there is no home."""
    chosen = os.environ.get("MOEFP8_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen:
            # It is made absolute, so that a chdir while a kernel compiles does not move it.
            return Path(chosen).expanduser().absolute()
        # The XDG standard says to ignore relative paths.
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "moefp8"
    except RuntimeError as error:
        place = f"MOEFP8_CACHE_DIR={chosen}" if chosen else "no MOEFP8_CACHE_DIR, and no ~/.cache"
        raise JitError(f"{place}: {error}") from error


def _from_disk(key: str, build: Callable[[], Cubin]) -> Cubin:
    try:
        folder = cache_folder()
        make_private(folder)
    except (OSError, JitError) as error:
        _warn(str(error))
        return build()
    path = folder / f"{key}.cubin"
    if cubin := _read(path, key):
        return cubin
    with _locked(path):
        # Most often, the process that had the lock before has published it.
        return _read(path, key) or _build_and_publish(path, key, build)


def _build_and_publish(path: Path, key: str, build: Callable[[], Cubin]) -> Cubin:
    global _disk_fails
    max_bytes = max_cache_bytes()
    cubin = build()
    try:
        make_private(path.parent)  # it may have been removed meanwhile
        publish(path, cubin.to_bytes(key))
        _disk_fails = False
        _forget_unused(path, max_bytes)
    except OSError as error:
        _disk_fails = True
        _warn(f"{path.parent}: {error}")
    return cubin


def max_cache_bytes() -> int:
    """`MOEFP8_CACHE_MAX_BYTES`: the bound of all kernels on disk together; 0 means none."""
    text = os.environ.get("MOEFP8_CACHE_MAX_BYTES", str(_MAX_BYTES))
    if not re.fullmatch("[0-9]{1,20}", text):
        short = text if len(text) <= 20 else f"{text[:20]}..."
        raise JitError(f"MOEFP8_CACHE_MAX_BYTES must be a number of bytes, got {short!r}")
    return int(text)


def _entries(folder: Path) -> dict[Path, os.stat_result]:
    """The kernels on disk, which are not verified."""
    entries = {}
    for path in folder.glob("*.cubin"):
        with suppress(OSError):  # another process has just removed it
            entries[path] = path.stat()
    return entries


def _forget_unused(kept: Path, max_bytes: int) -> None:
    """Remove the kernels that were used longest ago until the rest fits; never remove `kept`."""
    if not max_bytes:
        return
    entries = _entries(kept.parent)
    held = sum(status.st_size for status in entries.values())
    for path in sorted(entries, key=lambda path: entries[path].st_mtime_ns):
        if held > max_bytes and path != kept:
            path.unlink(missing_ok=True)
            held -= entries[path].st_size


class CacheState(NamedTuple):
    """folder: None if it is unknown. problem: why nothing can be kept there, or None."""

    folder: Path | None
    num_kernels: int
    num_bytes: int
    problem: str | None


def cache_state() -> CacheState:
    """The contents of the cache. Makes no folder."""
    folder = None
    try:
        folder = cache_folder()
        require_private(folder)
    except FileNotFoundError as error:  # it will be made, but not if it is relative to nothing
        return CacheState(folder, 0, 0, _why_not_made(folder) if folder else str(error))
    except (OSError, JitError) as error:
        return CacheState(folder, 0, 0, str(error))
    sizes = [status.st_size for status in _entries(folder).values()]
    return CacheState(folder, len(sizes), sum(sizes), None)


def _why_not_made(folder: Path) -> str | None:
    above = next(path for path in folder.parents if path.exists())
    return None if os.access(above, os.W_OK) else f"{above} cannot be written"


def read_beside_kernels(name: str) -> bytes | None:
    """A file in the cache folder, as `write_beside_kernels` left it; None if there is none.

    Raises OSError for what is another user's, larger than 16 MiB, or no regular file.
    """
    try:
        folder = cache_folder()
        require_private(folder)
    except (OSError, JitError):
        return None
    with suppress(FileNotFoundError):
        return read_ours(folder / name)
    return None


def write_beside_kernels(name: str, data: bytes) -> Path:
    """Write all of it or nothing. Raises OSError."""
    folder = cache_folder()
    make_private(folder)
    publish(folder / name, data)
    return folder / name


def _read(path: Path, key: str) -> Cubin | None:
    """The entry, or None if there is none, or one that we must not run."""
    try:
        data = read_ours(path)
    except OSError:
        return None
    with suppress(OSError):  # the disk is read-only, or the file not ours
        os.utime(path, follow_symlinks=False)  # when it was last used
    return Cubin.from_bytes(key, data)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time build an entry; or several, if no lock can be had."""
    lock = path.with_name(f".{path.stem}.lock")
    descriptor = _wait_for(lock)
    if descriptor is None:
        yield
        return
    try:
        # Processes that were killed left temporary files; as a rule, the writer has the lock.
        with suppress(OSError):
            for temporary in leftovers(path):
                temporary.unlink(missing_ok=True)
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _wait_for(lock: Path) -> int | None:
    """Wait for `try_lock`; None if no lock can be had."""
    if _disk_fails:
        return None
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        try:
            return try_lock(lock)
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:  # no locks on this file system, or not our file
            with suppress(OSError):
                lock.unlink()
            break
    return None


def _warn(cause: str) -> None:
    """Warn once per process: the kernels work, but the next process compiles them again."""
    if next(_num_warned) == 0:
        message = (
            "moefp8: compiled kernels cannot be kept on disk, so every process compiles them "
            f"again: {cause}; {_WAY_OUT}"
        )
        warnings.warn(message, UserWarning, stacklevel=2)
