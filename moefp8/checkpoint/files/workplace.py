"""Write a checkpoint in a directory beside its target; a later run can finish an earlier one's.

.TARGET.partial/lock           locked by the process that works here
.TARGET.partial/job.json       what is made here: its source and options
.TARGET.partial/reports/       a report on each shard, written before the shard gets its name
.TARGET.partial/checkpoint/    becomes TARGET by one rename
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...system.files import require_ours, sync, try_lock
from ...system.threads import lock_of_threads_and_forks
from ..errors import CheckpointError
from .safe_read import open_regular, read_object
from .target import check_free, write_json

_TEMPORARY = ".tmp"
_CHUNK_BYTES = 4 << 20
_WAIT = "wait for it, or choose another target"

_guard = lock_of_threads_and_forks()
_held: set[tuple[int, Path]] = set()  # (process, path): a forked child holds none


class Workplace:
    """The directory beside target. Files with final names are whole; dead runs leave others."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f".{target.name}.partial")
        self.content = self.path / "checkpoint"

    def report(self, name: str, advance: Callable[[int], None]) -> dict[str, Any] | None:
        """Return the report of an unchanged shard, else None; advance takes the bytes read."""
        try:
            record = read_object(self._report_path(name))
            is_same = record.get("shard") == _seal(self.content / name, advance)
        except (OSError, CheckpointError):
            return None
        report = record.get("report")
        return report if is_same and isinstance(report, dict) else None

    def is_finished(self, name: str) -> bool:
        """Whether the shard has a report, right or not."""
        return self._report_path(name).exists()

    def finish(self, name: str, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Let `write` make the shard and report on it; if it raises, no part of the shard stays."""
        temporary, report_path = self.content / f"{name}{_TEMPORARY}", self._report_path(name)
        try:
            report = write(temporary)
            record = {"shard": _seal(temporary, lambda _: None), "report": report}
            _publish_json(report_path, record)
            sync(report_path.parent)
            temporary.rename(self.content / name)
            sync(self.content)
        finally:
            temporary.unlink(missing_ok=True)
        return report

    def publish(self) -> None:
        """Rename the content to the target."""
        for folder, _, names in os.walk(self.content):
            for name in names:
                sync(Path(folder, name))
            sync(Path(folder))
        self.content.rename(self.target)
        sync(self.target.parent)
        shutil.rmtree(self.path, ignore_errors=True)

    def _report_path(self, name: str) -> Path:
        return self.path / "reports" / f"{name}.json"


@contextmanager
def workplace(target: Path, job: dict[str, Any]) -> Iterator[Workplace]:
    """Enter the directory beside target. Raises CheckpointError if another run or job uses it."""
    place = Workplace(target)
    _make_private(place.path)
    with _locked(place):
        _begin(place, job)
        yield place


@contextmanager
def _locked(place: Workplace) -> Iterator[None]:
    """Keep out processes by a file lock, which ends with its process, and threads by `_held`."""
    lock, me = place.path / "lock", (os.getpid(), place.path.resolve())
    with _guard:
        if me in _held:
            raise CheckpointError(f"{place.target}: another thread writes it; {_WAIT}")
        try:
            descriptor = try_lock(lock)
        except (BlockingIOError, FileNotFoundError) as error:  # no file: it has just finished
            raise CheckpointError(
                f"{place.target}: another process writes it, and holds {lock}; {_WAIT}"
            ) from error
        _held.add(me)
    try:
        yield
    finally:
        with _guard:
            _held.remove(me)
            os.close(descriptor)


def _begin(place: Workplace, job: dict[str, Any]) -> None:
    path = place.path / "job.json"
    has_begun = path.exists()
    try:
        check_free(place.target)  # the last holder of the lock may have made it
        if not has_begun:
            _publish_json(path, job)
    except (CheckpointError, OSError):
        if not place.content.exists():  # then nothing of value is here
            shutil.rmtree(place.path, ignore_errors=True)
        raise
    if has_begun:
        _check_same(path, job)
    for folder in (place.content, place.path / "reports"):
        folder.mkdir(exist_ok=True)
        _require_folder(folder)
    for remnant in place.content.iterdir():  # of a run that died
        if remnant.is_dir() and not remnant.is_symlink():
            shutil.rmtree(remnant)
        elif remnant.is_symlink() or not place.is_finished(remnant.name):
            remnant.unlink()


def _make_private(path: Path) -> None:
    """Make path, or check that only we can write there: all files in it are published."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        require_ours(path, _require_folder(path))
    except PermissionError as error:
        raise CheckpointError(f"{error}; remove {path}, or choose another target") from error


def _require_folder(path: Path) -> os.stat_result:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{path}: must be a directory, and no link; remove it")
    return status


def _seal(path: Path, advance: Callable[[int], None]) -> dict[str, Any]:
    """Return the size and SHA-256 that identify a file. Raises OSError, CheckpointError."""
    digest, num_bytes = hashlib.sha256(), 0
    with open(open_regular(path), "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
            advance(len(chunk))
    return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}


def _check_same(path: Path, job: dict[str, Any]) -> None:
    try:
        begun = read_object(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; remove {path.parent} to start again") from error
    job = json.loads(json.dumps(job))  # as read_object returns it: tuples are lists
    differing = [key for key in {**begun, **job} if begun.get(key) != job.get(key)]
    if differing:
        raise CheckpointError(
            f"{path.parent}: was begun with another {', '.join(differing)} than now; repeat that "
            "command to go on, or remove the directory to start again"
        )


def _publish_json(path: Path, value: dict[str, Any]) -> None:
    """Write all of value, or nothing if that fails."""
    temporary = path.with_name(f"{path.name}{_TEMPORARY}")
    temporary.unlink(missing_ok=True)  # opening a pipe would wait for a reader
    write_json(temporary, value)
    sync(temporary)
    temporary.replace(path)
