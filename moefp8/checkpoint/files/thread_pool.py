"""Work through a list in a few threads; the first failure stops them all."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch

from ...system.threads import lock_of_threads_and_forks

T = TypeVar("T")

_setting = lock_of_threads_and_forks()


def run_all(
    tasks: Iterable[T],
    work: Callable[[Iterator[T]], None],
    num_threads: int,
    name: str,
    *,
    serial: bool = False,
) -> None:
    """Call work(tasks) in each thread; the threads share all tasks, and take them in their order.

    Raises what work raised, after all threads have ended. name: of the threads, with a number each.
    serial: their PyTorch operations use one thread each.
    """
    _settle(serial=False)  # the caller is a thread, too
    waiting = deque(tasks)  # threads may take from a deque at once

    def mine() -> Iterator[T]:
        with suppress(IndexError):  # there are no more
            while True:
                yield waiting.popleft()

    @torch.inference_mode()  # else a thread could not write to tensors made in inference mode
    def run() -> None:
        try:
            work(mine())
        finally:
            waiting.clear()  # it is empty already, unless work has failed

    with ThreadPoolExecutor(num_threads, name, partial(_settle, serial)) as pool:
        workers = [pool.submit(run) for _ in range(num_threads)]
        try:
            for worker in workers:
                worker.result()
        finally:
            waiting.clear()  # also on Ctrl-C: the pool waits for its threads


def _settle(serial: bool) -> None:
    """Ask PyTorch for its number of threads in a new thread, one such thread after the other.

    The first call makes PyTorch's threads again if a fork has lost them; of two calls at once, one
    may fail ("Invalid thread pool"). A thread sets the number for itself and for all threads that
    have not asked yet: another thread sets it back for those.
    """
    with _setting:
        before = torch.get_num_threads()
        if serial:
            torch.set_num_threads(1)
            other = threading.Thread(target=torch.set_num_threads, args=(before,))
            other.start()
            other.join()
