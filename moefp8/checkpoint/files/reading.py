"""Open the files of a checkpoint and read at a position: an mmap would be resident memory."""

import ctypes
import os
from contextlib import ExitStack
from pathlib import Path

import torch

from ..errors import CheckpointError, failing_as
from .header import Entry, Shard, stamp_of
from .safe_read import open_regular

Files = dict[Path, int]


def open_files(
    stack: ExitStack,
    entries: list[Entry],
    shards: dict[Path, Shard],
    outcome: str = "the model is unchanged",
) -> Files:
    """Return path -> descriptor; stack closes them. Raises CheckpointError if one has changed."""
    files: Files = {}
    for path in dict.fromkeys(entry.file for entry in entries):
        with failing_as(path, "cannot be read", outcome):
            files[path] = open_regular(path)
            stack.callback(os.close, files[path])
            changed = stamp_of(os.fstat(files[path])) != shards[path].stamp
        if changed:
            raise CheckpointError(f"{path}: changed since it was opened; {outcome}")
    return files


def read_into(file: int, begin: int, tensor: torch.Tensor) -> None:
    """Fill the memory of tensor, contiguous and on the CPU, from byte begin of file."""
    buffer = memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
    while buffer:
        num_read = os.preadv(file, [buffer], begin)
        if num_read == 0:
            raise EOFError(f"file ends at byte {begin}, {len(buffer)} bytes short")
        buffer, begin = buffer[num_read:], begin + num_read
