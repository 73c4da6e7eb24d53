"""Work through a list in a few threads; the first failure stops them all."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from ...kernels.jit.once import lock_of_threads_and_forks

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
    """Call work(its tasks) in each thread; together they are given all, in their order.

    Raises what work raised, once no thread works any more. name: of the threads. serial: each
    operation of theirs is of one thread; the number of threads of all others stays as it is.
    """
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    stop = threading.Event()

    def mine() -> Iterator[T]:
        while not stop.is_set():
            try:
                yield waiting.get_nowait()
            except queue.Empty:
                return

    @torch.inference_mode()  # else a thread could not write to tensors made in inference mode
    def run() -> None:
        try:
            work(mine())
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(num_threads, name, partial(_settle, serial)) as pool:
        workers = [pool.submit(run) for _ in range(num_threads)]
        try:
            for worker in workers:
                worker.result()
        finally:
            stop.set()  # also on Ctrl-C: the pool waits for its threads


def _settle(serial: bool) -> None:
    """What a thread does first, one after the other.

    A thread's first question for its number of threads makes those of torch anew if a fork has
    lost them, and of two that ask at once one may find none ("Invalid thread pool"). What it sets
    is its own and, from then on, that of threads which have not asked yet: for those another
    thread sets it back.
    """
    with _setting:
        before = torch.get_num_threads()
        if serial:
            torch.set_num_threads(1)
            other = threading.Thread(target=torch.set_num_threads, args=(before,))
            other.start()
            other.join()
