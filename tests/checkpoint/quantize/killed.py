"""Run quantize_checkpoint in children that are killed, over and over; a script, since it forks.

    python -m tests.checkpoint.quantize.killed {calls, moments, race} SOURCE FOLDER

No thread was started before it forks. It fails by an exception.
"""

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from moefp8.checkpoint import quantize_checkpoint
from moefp8.checkpoint.model.skeleton import skeleton_of
from tests.checkpoint.quantize.cases import PLAIN, files_of, finished, partial_of

OPTIONS = {"max_shard_bytes": 200_000, "progress": False}
CALLS = ("pwrite", "fsync", "rename", "replace", "unlink", "mkdir", "open", "rmdir")


def start(run: Callable[[], None]) -> int:
    """Fork a child that exits with 0, or with 1 if run raises."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        run()
        status = 0
    except Exception as error:
        os.write(1, f"{error}\n".encode())  # at once, since others write there too
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait(child: int) -> int:
    """Return its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_before(number: int) -> None:
    """Kill this process before call `number` of those that change files."""
    left = [number]

    def counted(real):
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def check_kept(target: Path, before: dict[str, tuple[int, int]]) -> None:
    for name, known in before.items():
        status = (target / name).stat()
        assert (status.st_ino, status.st_mtime_ns) == known, f"{name} was written again"


def quantize(source: Path, target: Path, last_call: int = 0) -> None:
    """Quantize, and be killed before last_call if that is not 0."""
    die_before(last_call)
    quantize_checkpoint(source, target, **OPTIONS)


def at_every_call(source: Path, folder: Path, expected: dict[str, bytes]) -> None:
    """Killed before its n-th call, a run leaves nothing or all; the next one completes it."""
    kept, number = 0, 0
    while True:
        number += 1
        target = folder / f"t{number}"
        status = wait(start(partial(quantize, source, target, number)))
        if target.exists():
            assert files_of(target) == expected, f"incomplete after {number} calls"
            if status == 0:
                break
            continue
        assert status == -signal.SIGKILL, status
        before = finished(target)
        kept += len(before)
        assert wait(start(partial(quantize, source, target))) == 0
        assert files_of(target) == expected, f"differs after {number} calls"
        assert not partial_of(target).exists()
        check_kept(target, before)
    assert number > 50, number
    assert kept > 10, kept
    print(f"{number} calls")


def at_random_moments(source: Path, folder: Path, expected: dict[str, bytes]) -> None:
    """A run is given a third more time each time, so that it ends although nothing may be kept.

    How many are killed depends on how busy the machine is, so runs go on until some were.
    """
    durations = []
    for number in range(3):
        started = time.monotonic()
        assert wait(start(partial(quantize, source, folder / f"whole{number}"))) == 0
        durations.append(time.monotonic() - started)
    kills = 0
    for number in itertools.count():
        if number >= 8 and kills > 8:
            break
        target, before = folder / f"r{number}", {}
        for attempt in itertools.count(1):
            child = start(partial(quantize, source, target))
            time.sleep(random.uniform(0, attempt * min(durations) / 3))
            os.kill(child, signal.SIGKILL)  # not waited for yet, so the number is its own
            kills += wait(child) == -signal.SIGKILL
            if target.exists():
                break
            assert before.items() <= finished(target).items()
            before = finished(target)
        assert files_of(target) == expected
        check_kept(target, before)
    print(f"{kills} kills")


def race(source: Path, folder: Path, expected: dict[str, bytes]) -> None:
    """One of several processes that want the same gets it, and the others are told."""
    for number in range(5):
        target = folder / f"c{number}"
        children = [start(partial(quantize, source, target)) for _ in range(4)]
        assert sorted(map(wait, children)) == [0, 1, 1, 1]
        assert files_of(target) == expected
        assert not partial_of(target).exists()


if __name__ == "__main__":
    what = {"calls": at_every_call, "moments": at_random_moments, "race": race}[sys.argv[1]]
    source, folder = map(Path, sys.argv[2:])
    skeleton_of(PLAIN)  # imports transformers: once, and not in every child
    reference = folder / "reference"
    assert wait(start(lambda: quantize(source, reference))) == 0
    what(source, folder, files_of(reference))
