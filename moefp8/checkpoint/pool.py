"""Work through a list in a few threads; the first failure stops them all."""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run_all(tasks: Iterable[T], run: Callable[[T], None], num_threads: int, name: str) -> None:
    """Call run(task) for each, begun in their order; name: of the threads.

    Raises what run raised, once no thread works any more.
    """
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    stop = threading.Event()

    @torch.inference_mode()  # else a thread could not write to tensors made in inference mode
    def work() -> None:
        while not stop.is_set():
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                run(task)
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(num_threads, name) as pool:
        workers = [pool.submit(work) for _ in range(num_threads)]
        try:
            for worker in workers:
                worker.result()
        finally:
            stop.set()  # also on Ctrl-C: the pool waits for its threads
