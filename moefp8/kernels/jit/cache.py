"""Compiled kernels, kept in memory and in the user's cache folder.

One file per kernel, named by its key and checked by a checksum: a single file is published by one
atomic rename, so readers see all of it or nothing, and whoever is second replaces it by the same
bytes. A folder per kernel would need its losers to clean up.
"""

import itertools
import os
import secrets
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

from .cubin import Cubin
from .once import ForksWait, Once

_memory: Once[str, Cubin] = Once()
# NVRTC has locks of its own: a child forked while a thread held one would wait for it for ever.
compiling = ForksWait()
_num_warned = itertools.count()  # next() is atomic


def cached(key: str, build: Callable[[], Cubin]) -> Cubin:
    """The cubin of that key: from memory, else from disk, else built and stored."""
    return _memory.get(key, lambda: _from_disk(key, build))


def cache_folder() -> Path:
    """`MOEFP8_CACHE_DIR`, else the user's cache folder."""
    if chosen := os.environ.get("MOEFP8_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG standard says to ignore relative paths.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "moefp8"


def _from_disk(key: str, build: Callable[[], Cubin]) -> Cubin:
    try:
        folder = cache_folder()
        _make_private(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _warn(error)
        return _build(build)
    path = folder / f"{key}.cubin"
    cubin = _read(path, key)
    if cubin is None:
        cubin = _build(build)
        try:
            _publish(path, cubin.to_bytes(key))
        except OSError as error:
            _warn(error)
    return cubin


def _build(build: Callable[[], Cubin]) -> Cubin:
    with compiling:
        return build()


def _make_private(folder: Path) -> None:
    """The folder holds code that we run: nobody else may own it or write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user (uid {status.st_uid})")
    if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {folder}; chmod go-w it")


def _read(path: Path, key: str) -> Cubin | None:
    try:
        return Cubin.from_bytes(key, path.read_bytes())
    except OSError:
        return None


def _publish(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _warn(error: Exception) -> None:
    """Once per process: the kernels work, but the next process compiles them again."""
    if next(_num_warned) == 0:
        message = (
            "moefp8: compiled kernels cannot be kept on disk, so every process compiles them "
            f"anew: {error}; set MOEFP8_CACHE_DIR to a folder of your own"
        )
        warnings.warn(message, UserWarning, stacklevel=2)
