"""Work through a list in a few threads; the first failure stops them all."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run_all(
    tasks: Iterable[T], work: Callable[[Iterator[T]], None], num_threads: int, name: str
) -> None:
    """Call work(its tasks) in each thread; together they are given all, in their order.

    Raises what work raised, once no thread works any more. name: of the threads.
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

    with ThreadPoolExecutor(num_threads, name) as pool:
        workers = [pool.submit(run) for _ in range(num_threads)]
        try:
            for worker in workers:
                worker.result()
        finally:
            stop.set()  # also on Ctrl-C: the pool waits for its threads
