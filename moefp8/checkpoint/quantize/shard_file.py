"""Write a safetensors file piece by piece: first the header, then tensors in any order.

The safetensors library only writes tensors that are in memory, all at once.
"""

import ctypes
import json
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import failing_as
from ..files.header import TORCH_DTYPES, Entry
from ..files.safe_read import NO_LINK

OUTCOME = "finished shards are kept: mend it, and run again to go on"  # how errors end


def create(
    path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...]]]
) -> tuple[int, dict[str, Entry]]:
    """Make the file and write its header; return its descriptor, and key -> entry.

    tensors: (key, dtype, shape) each. Wide dtypes come first, as in the library, so that every
    tensor is aligned to its dtype. Raises CheckpointError.
    """
    entries: dict[str, Entry] = {}
    position = 0
    for key, dtype, shape in sorted(tensors, key=lambda x: (-TORCH_DTYPES[x[1]].itemsize, x[0])):
        end = position + math.prod(shape) * TORCH_DTYPES[dtype].itemsize
        entries[key] = Entry(key, dtype, shape, path, position, end)
        position = end
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for key, x in entries.items():
        header[key] = {"dtype": x.dtype, "shape": x.shape, "data_offsets": [x.begin, x.end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with failing_as(path, "cannot be written", OUTCOME):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | NO_LINK, 0o666)
        try:
            _write_all(file, memoryview(len(text).to_bytes(8, "little") + text), 0)
        except BaseException:
            os.close(file)
            raise
    return file, {
        key: replace(x, begin=start + x.begin, end=start + x.end) for key, x in entries.items()
    }


def write(file: int, entry: Entry, offset: int, tensor: torch.Tensor) -> None:
    """Put the bytes of tensor, contiguous and on the CPU, at byte offset of entry in its file.

    Raises CheckpointError naming key and file.
    """
    if tensor.nbytes:
        buffer = memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
        with failing_as(entry, "cannot be written", OUTCOME):
            _write_all(file, buffer, entry.begin + offset)


def _write_all(file: int, buffer: memoryview, position: int) -> None:
    while buffer:
        num_written = os.pwrite(file, buffer, position)
        buffer, position = buffer[num_written:], position + num_written
