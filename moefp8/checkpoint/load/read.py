"""Read tensors from files into a model, by positioned reads in a few threads.

Bytes land in the module's own storage where they can; other tasks pass through `staging`.
"""

import os
from collections.abc import Iterator
from functools import partial

import torch

from ...progress import Progress
from ..errors import CheckpointError, failing_as
from ..files.header import Entry
from ..files.reading import Files
from ..files.thread_pool import run_all
from .assign import Copy
from .staging import Staging
from .tasks import DIRECT_BYTES, Task, tasks_of

_NUM_THREADS = 4


def check_twins(twins: list[tuple[Entry, Entry]], files: Files) -> None:
    """Raise CheckpointError unless two entries for one tied tensor hold the same bytes."""
    for first, second in twins:
        for offset in range(0, first.num_bytes, DIRECT_BYTES):
            num_bytes = min(DIRECT_BYTES, first.num_bytes - offset)
            chunks = []
            for entry in (first, second):
                with failing_as(entry, "reading failed", "the model is unchanged"):
                    chunks.append(os.pread(files[entry.file], num_bytes, entry.begin + offset))
            if chunks[0] != chunks[1] or len(chunks[0]) != num_bytes:
                raise CheckpointError(
                    f"{second}: differs from {first}, but the model ties the two; ignore one of "
                    "them, or untie the model; the model is unchanged"
                )


def read_copies(copies: list[Copy], files: Files, progress: bool | None) -> int:
    """Fill every slot and return the bytes. Raises CheckpointError naming key and file at fault."""
    copies = sorted(copies, key=lambda copy: (str(copy.entry.file), copy.entry.begin))
    tasks = [task for copy in copies for task in tasks_of(copy)]
    total = sum(task.num_bytes for task in tasks)
    _prepare(copies)
    with Progress("loading", total, "GiB", 2**30, progress) as bar:
        run_all(tasks, partial(_work, files, bar), _NUM_THREADS, "moefp8-load")
    return total


@torch.inference_mode()  # else tensors made in inference mode could not be written to
def _prepare(copies: list[Copy]) -> None:
    """Zero the places of other ranks' entries, and wait until nothing else writes to the model."""
    owners = dict.fromkeys(copy.slot.owner for copy in copies)
    for owner in owners:
        owner.clear_padding()
    for device in {owner.tensor.device for owner in owners}:
        if device.type == "cuda":  # the streams of `staging` wait for no other
            torch.cuda.synchronize(device)


def _work(files: Files, bar: Progress, tasks: Iterator[Task]) -> None:
    """Run tasks in one thread."""
    failed = ("reading failed", "the model is now partly written: load again before using it")
    with failing_as("the last copies", *failed), Staging() as staging:
        for task in tasks:
            with failing_as(task.entry, *failed):
                staging.run(task, files[task.entry.file])
            bar.advance(task.num_bytes)
