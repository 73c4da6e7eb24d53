"""Read tensors from files into a model: positioned reads, a few threads, no second copy.

A task is at most 16 MiB of one entry. If dtype, layout and device agree it lands in the
module's own storage, else in a temporary of that size which is then cast and copied. No mmap:
its pages would count as resident memory.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from moefp8.progress import Progress

from .errors import CheckpointError
from .header import TORCH_DTYPES, Entry, Shard, stamp_of
from .plan import Copy
from .pool import run_all

_NUM_THREADS = 4
_TASK_BYTES = 16 << 20

Files = dict[Path, int]


@dataclass(frozen=True, eq=False)
class _Task:
    """Bytes [begin, begin + num_bytes) of entry's file, for target; direct: no cast in between."""

    entry: Entry
    begin: int
    num_bytes: int
    target: torch.Tensor
    direct: bool


def open_files(
    stack: ExitStack,
    entries: list[Entry],
    shards: dict[Path, Shard],
    outcome: str = "the model is unchanged",
) -> Files:
    """path -> descriptor, closed by stack. Raises CheckpointError if a file has changed.

    outcome: how the error ends, what became of the caller's work.
    """
    files: Files = {}
    for path in dict.fromkeys(entry.file for entry in entries):
        try:
            files[path] = os.open(path, os.O_RDONLY)
            stack.callback(os.close, files[path])
            changed = stamp_of(os.fstat(files[path])) != shards[path].stamp
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error.strerror}); {outcome}"
            ) from error
        if changed:
            raise CheckpointError(f"{path}: changed since it was opened; {outcome}")
    return files


def check_twins(twins: list[tuple[Entry, Entry]], files: Files) -> None:
    """Two entries for one tied tensor must hold the same bytes."""
    for first, second in twins:
        for offset in range(0, first.num_bytes, _TASK_BYTES):
            num_bytes = min(_TASK_BYTES, first.num_bytes - offset)
            chunks = [
                os.pread(files[entry.file], num_bytes, entry.begin + offset)
                for entry in (first, second)
            ]
            if chunks[0] != chunks[1] or len(chunks[0]) != num_bytes:
                raise CheckpointError(
                    f"{second}: differs from {first}, but the model ties the two; ignore one of "
                    "them, or untie the model; the model is unchanged"
                )


def read_copies(copies: list[Copy], files: Files, progress: bool | None) -> int:
    """Fill every slot; returns bytes. Raises CheckpointError naming key and file at fault."""
    copies = sorted(copies, key=lambda copy: (str(copy.entry.file), copy.entry.begin))
    tasks = [task for copy in copies for task in _split(copy)]
    total = sum(copy.entry.num_bytes for copy in copies)
    with Progress("loading", total, "GiB", 2**30, progress) as bar:

        def run(task: _Task) -> None:
            try:
                _run(task, files[task.entry.file])
            except (OSError, EOFError, RuntimeError, MemoryError) as error:
                raise CheckpointError(
                    f"{task.entry}: reading failed ({error}); the model is now partly written: "
                    "load again before using it"
                ) from error
            bar.advance(task.num_bytes)

        run_all(tasks, run, _NUM_THREADS, "moefp8-load")
    return total


def _split(copy: Copy) -> Iterator[_Task]:
    entry, target = copy.entry, copy.slot.view()
    if target.numel() == 0:
        return
    dtype = TORCH_DTYPES[entry.dtype]
    if not target.is_contiguous():
        yield _Task(entry, entry.begin, entry.num_bytes, target, False)
        return
    direct = target.dtype == dtype and target.device.type == "cpu"
    flat, step = target.view(-1), _TASK_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        num_bytes = piece.numel() * dtype.itemsize
        yield _Task(entry, entry.begin + start * dtype.itemsize, num_bytes, piece, direct)


def _run(task: _Task, file: int) -> None:
    if task.direct:
        read_into(file, task.begin, task.target)
        return
    temporary = torch.empty(
        task.target.shape,
        dtype=TORCH_DTYPES[task.entry.dtype],
        pin_memory=task.target.is_cuda,  # or the driver would copy it once more
    )
    read_into(file, task.begin, temporary)
    task.target.copy_(temporary)


def read_into(file: int, begin: int, tensor: torch.Tensor) -> None:
    """Fill the memory of tensor, contiguous and on the CPU, from byte begin of file."""
    num_bytes = tensor.numel() * tensor.element_size()
    buffer = memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr()))
    while buffer:
        num_read = os.preadv(file, [buffer], begin)
        if num_read == 0:
            raise EOFError(f"file ends at byte {begin}, {len(buffer)} bytes short")
        buffer, begin = buffer[num_read:], begin + num_read
