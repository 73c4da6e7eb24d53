"""Write one safetensors file straight from the tensors' memory.

The library's save_file needs numpy and, in older versions, copies a shard first; the format is
8 bytes of header length, JSON, then the tensors without holes.
"""

import ctypes
import json
import os
from pathlib import Path

import torch

from .errors import CheckpointError
from .header import DTYPE_NAMES


def num_bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """tensors: key -> tensor, on any device. Copies only what is not contiguous CPU memory."""
    # Widest first, as the library does: every tensor then starts at a multiple of its item size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{key}: safetensors has no dtype for {tensor.dtype}")
        begin, position = position, position + num_bytes_of(tensor)
        header[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, position],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for _, tensor in ordered:
            _write_tensor(file.fileno(), tensor)
        os.fsync(file.fileno())


def write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(data))
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in it as durable as the files."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write_tensor(file: int, tensor: torch.Tensor) -> None:
    tensor = tensor.contiguous().cpu()  # the tensor itself where it is both; keeps it alive
    if num_bytes := num_bytes_of(tensor):
        memory = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
        _write(file, memoryview(memory))


def _write(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]
