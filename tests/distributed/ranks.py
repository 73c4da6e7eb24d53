"""Processes that are the ranks of a group, and run what a test sends them, as often as it wants."""

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_S = 300  # only a rank that hangs takes as long, however busy the machine is
# What ranks import. One server imports it, once, and ranks without a GPU are forks of it.
_IMPORTED = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "hypothesis", "pytest"]


def start_method() -> str:
    """How processes of ranks start. With a GPU they start afresh: they may read other variables."""
    if torch.cuda.is_available():
        return "spawn"
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTED)
    return "forkserver"


def run_processes(function: Callable[..., Any], arguments: tuple[Any, ...], num: int) -> None:
    """function(rank, *arguments) in a process for each rank."""
    start = torch.multiprocessing.start_processes
    start(function, arguments, nprocs=num, start_method=start_method())


class Ranks:
    """`num_ranks` processes with a default group; `run` calls a function on all of them."""

    def __init__(self, num_ranks: int, folder: Path, backend: str = "gloo") -> None:
        context = torch.multiprocessing.get_context(start_method())
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(
                target=_serve, args=(rank, num_ranks, folder, backend, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], each: Sequence[tuple[Any, ...]]) -> list[Any]:
        """function(*each[rank]) of every rank; an exception as its text, behind its kind."""
        for pipe, arguments in zip(self.pipes, each, strict=True):
            pipe.send((function, arguments))
        return [self.take(rank) for rank in range(len(self.pipes))]

    def run_on(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """The same of one rank, while the others do nothing."""
        self.pipes[rank].send((function, arguments))
        return self.take(rank)

    def take(self, rank: int) -> Any:
        """What the rank's last call gave."""
        if not self.pipes[rank].poll(PATIENCE_S):
            raise TimeoutError(f"rank {rank} has not answered for {PATIENCE_S} s")
        return self.pipes[rank].recv()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def ranks(num_ranks: int, folder: Path, backend: str = "gloo") -> Iterator[Ranks]:
    made = Ranks(num_ranks, folder, backend)
    try:
        yield made
    finally:
        made.close()


def _serve(rank: int, num_ranks: int, folder: Path, backend: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store, timeout = f"file://{folder}/store", timedelta(seconds=PATIENCE_S)
    dist.init_process_group(backend, store, timeout, world_size=num_ranks, rank=rank)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the test has ended
            os._exit(0)
        try:
            pipe.send(function(*arguments))
        except Exception as error:
            if os.environ.get("MOEFP8_TRACEBACKS"):
                traceback.print_exc()
            pipe.send(f"{type(error).__name__}: {error}")
