"""How many workers `--numprocesses auto` starts, and which tests one takes at once on a GPU."""

import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

GIB = 1 << 30
WORKER_GIB = 2  # tests of checkpoints take up to 1.9 for a moment, all else up to 1.3


# ---- How many workers ----


class Machine(NamedTuple):
    """The cores that this process may use, and the memory in bytes that is free for it."""

    num_cores: int
    num_bytes: float

    @classmethod
    def at_hand(cls, root: Path = Path("/")) -> "Machine":
        """Read affinity, and the limits of Linux and of a container; root: of the file system."""
        affinity = getattr(os, "sched_getaffinity", None)  # only Linux has it
        num_cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        num_bytes, cgroup = float("inf"), root / "sys/fs/cgroup"
        with suppress(OSError, LookupError, ValueError):
            num_bytes = 1024 * _numbers(root / "proc/meminfo")["MemAvailable:"]
        with suppress(OSError, ValueError):  # "max" is no number, and no limit
            quota, period = map(int, (cgroup / "cpu.max").read_text().split())
            num_cores = min(num_cores, max(1, quota // period))
        with suppress(OSError, LookupError, ValueError):
            limit, used = int((cgroup / "memory.max").read_text()), _numbers(cgroup / "memory.stat")
            num_bytes = min(num_bytes, limit - used["anon"] - used["shmem"])  # caches give way
        return cls(num_cores, num_bytes)

    @property
    def num_workers(self) -> int:
        return int(max(1, min(self.num_cores, self.num_bytes // (WORKER_GIB * GIB))))

    def __str__(self) -> str:
        return f"{self.num_cores} cores and {self.num_bytes / GIB:.1f} GiB of free memory"


def _numbers(path: Path) -> dict[str, int]:
    """The first two words of each line."""
    return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}


# ---- Which tests they take ----

_NEIGHBOURS = 4


def let_files_take_turns(items: list[pytest.Item], tests: Sequence[pytest.Item]) -> None:
    """Let a worker take four neighbours at once, and the workers tests of different files.

    Neighbours launch the same kernels: one worker compiles these, for which the others would wait.
    Slow tests and groups (`xdist_group`) begin first, so that none is left when all else is done.

    items: what was collected, and comes in another order. tests: those of them that may be chosen.
    """
    by_file, progress, number = defaultdict(list), {}, count()
    for test in tests:
        if not any(test.iter_markers("xdist_group")) and not _is_slow(test):
            by_file[test.path].append(test)
    for chosen in by_file.values():
        for begin in range(0, len(chosen), _NEIGHBOURS):
            group = pytest.mark.xdist_group(str(next(number)))
            for test in chosen[begin : begin + _NEIGHBOURS]:
                test.add_marker(group)
                progress[test] = begin / len(chosen)
    items.sort(key=lambda item: progress.get(item, -1))


def begin_with_slow_files(items: list[pytest.Item], num_workers: int) -> None:
    """Let every worker begin with files that have slow tests: what is left last is short.

    `--dist worksteal` cuts the list into equal parts, one for each worker, who later takes from the
    end of another's. Tests of a file stay together, since they share what a fixture has set up.

    items: all tests that workers run; they come in another order.
    """
    by_file = defaultdict(list)
    for item in items:
        by_file[item.path].append(item)
    num_slow = {path: sum(map(_is_slow, tests)) for path, tests in by_file.items()}
    first: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    weights = [0] * num_workers
    for path in sorted(filter(num_slow.get, by_file), key=num_slow.__getitem__, reverse=True):
        worker = weights.index(min(weights))
        weights[worker] += num_slow[path]
        first[worker] += by_file.pop(path)
    others, ordered = [item for tests in by_file.values() for item in tests], []
    for worker, tests in enumerate(first):
        size = (len(items) - len(ordered)) // (num_workers - worker)
        num_others = max(0, size - len(tests)) if worker + 1 < num_workers else len(others)
        ordered += tests + others[:num_others]
        del others[:num_others]
    items[:] = ordered


def _is_slow(test: pytest.Item) -> bool:
    return any(test.iter_markers("slow"))
