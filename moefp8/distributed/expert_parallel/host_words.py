"""Words of memory in which the ranks of one host gather the numbers of all of them.

P ranks, N values of a rank.
"""

import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from io import FileIO
from pathlib import Path

FOLDER = Path("/dev/shm")  # of files that are memory; without it, ranks share none
_ONE = 1 << 32
_SECONDS_OF_SPINNING, _MOST_SECONDS_OF_SLEEP = 5e-4, 1e-3


class HostWords:
    """A file that each rank has mapped, and that has no name any more.

    A word is the number of a gathering, times 2^32, plus a value, and is written as a whole. So a
    gathering is complete when all words have its number, in whatever order they come. Two sets of
    words take turns: a rank that writes gathering n + 2 has seen all of n + 1, and each rank writes
    that when it has read n.

    As long as a rank may come, it holds a lock of a byte of the file, which the system takes from a
    process that ends.
    """

    def __init__(
        self, file: FileIO, rank: int, num_ranks: int, num_values: int, timeout: timedelta
    ) -> None:
        self._file, self._rank, self._timeout = file, rank, timeout.total_seconds()
        self._num_ranks, self._num_values, self._number = num_ranks, num_values, 0
        num_bytes = 2 * num_ranks * num_values * 8
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        self._words = memoryview(mmap.mmap(file.fileno(), num_bytes)).cast("Q")
        self._lock(rank, os.F_TLOCK)

    @classmethod
    def of(
        cls,
        gather: Callable[[Sequence[int]], list[list[int]]],
        rank: int,
        num_ranks: int,
        num_values: int,
        timeout: timedelta,
    ) -> "HostWords | None":
        """Those of ranks that call it together; None on all of them: they share no memory.

        gather: brings values of each rank to all ranks.
        """
        name = f"moefp8-{gather([secrets.randbits(62)])[0][0]:x}"  # that rank 0 has drawn
        mode, made = "x+" if rank == 0 else "r+", None
        private = partial(os.open, mode=0o600)
        try:
            for is_our_turn in (rank == 0, rank > 0):
                with suppress(OSError):
                    if is_our_turn:
                        file = FileIO(FOLDER / name, mode, opener=private)
                        made = cls(file, rank, num_ranks, num_values, timeout)
                come = gather([made is not None])
        finally:
            if rank == 0:
                (FOLDER / name).unlink(missing_ok=True)
        sees_all = made is not None and min(come) == [1] and made._ended() is None
        return made if min(gather([sees_all])) == [1] else None

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The N values of each rank, by rank; they are in [0, 2^32).

        Raises RuntimeError if a rank has ended or does not come in time, and at each later call.
        """
        if self._file.closed:
            raise RuntimeError("as in an earlier call")
        self._number = self._number % (_ONE - 2) + 1  # 0: no rank has written the memory
        size, base = self._num_values, self._number * _ONE
        begin = self._number % 2 * self._num_ranks * size
        own = begin + self._rank * size
        try:
            for at, value in enumerate(values, own):
                self._words[at] = base + value
            words = self._wait(begin, base)
        except BaseException:  # this rank comes no more, so the others must stop
            for at in range(own, own + size):
                self._words[at] = 0
            self._file.close()
            raise
        came = [x - base for x in words]
        return [came[at : at + size] for at in range(0, len(came), size)]

    def _wait(self, begin: int, base: int) -> list[int]:
        """Wait until all words of a gathering are there; returns them."""
        end, began, problem = begin + self._num_ranks * self._num_values, time.monotonic(), None
        while True:
            words: list[int] = self._words[begin:end].tolist()
            if base <= min(words) and max(words) < base + _ONE:
                return words
            if problem is not None:  # and the words were read once more since
                raise RuntimeError(problem)
            waited = time.monotonic() - began
            if waited < _SECONDS_OF_SPINNING:
                os.sched_yield()
            elif (ended := self._ended()) is not None:
                problem = f"rank {ended} of the group has ended or given up"
            elif waited > self._timeout:
                missing = [at for at, x in enumerate(words) if not base <= x < base + _ONE]
                problem = f"rank {missing[0] // self._num_values} of the group did not come"
            else:
                time.sleep(min(waited / 8, _MOST_SECONDS_OF_SLEEP))

    def _ended(self) -> int | None:
        """A rank that comes no more, or None."""
        for rank in range(self._num_ranks):
            if rank != self._rank:
                try:
                    self._lock(rank, os.F_TEST)
                except OSError:  # its process has the lock
                    continue
                return rank
        return None

    def _lock(self, rank: int, how: int) -> None:
        os.lseek(self._file.fileno(), rank, os.SEEK_SET)
        os.lockf(self._file.fileno(), how, 1)
