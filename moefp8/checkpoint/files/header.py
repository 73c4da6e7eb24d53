"""Read the header of a safetensors file, and check all that it says.

Layout: 8 bytes little-endian header length, a JSON object, then the tensors without holes.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, failing_as, quoted
from .safe_read import check_key, open_regular, parse_object

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_DIMENSIONS = 64
_MAX_DTYPE = 32

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
FP8 = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")  # each upcasts to FP32 exactly
PLAIN_DTYPES = ("F64", "F32", "BF16", "F16", "I64", "BOOL")  # of tensors that are not quantized
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint; begin and end count from the start of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.key} in {self.file}"


@dataclass(frozen=True)
class Shard:
    """One safetensors file. stamp: the size and time by which a later change is noticed.

    entries: the tensors that are whole; named: all keys of the header; problems: a sentence for
    each tensor that is not whole.
    """

    path: Path
    stamp: tuple[int, int]
    entries: tuple[Entry, ...]
    named: frozenset[str]
    problems: tuple[str, ...]


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def read_shard(path: Path) -> Shard:
    """Read the header of a safetensors file. Raises CheckpointError if it cannot be read."""
    with failing_as(path, "cannot be read"), open(open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        prefix = file.read(8)
        num_header = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or num_header > min(_MAX_HEADER_BYTES, status.st_size - 8):
            raise CheckpointError(
                f"{path}: truncated or not safetensors: {status.st_size} bytes cannot hold "
                f"a header of {num_header}; fetch the file again"
            )
        header = parse_object(file.read(num_header), f"{path}: header")
    header.pop("__metadata__", None)
    entries = [_entry(path, key, value, 8 + num_header) for key, value in header.items()]
    whole, problems = _whole(path, entries, 8 + num_header, status.st_size)
    return Shard(path, stamp_of(status), tuple(whole), frozenset(header), tuple(problems))


def _entry(path: Path, key: str, value: Any, start: int) -> Entry:
    check_key(key, f"{path}: corrupt header")
    where = f"{key} in {path}: corrupt header"
    if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
        rule = "an entry holds dtype, shape and data_offsets"
        raise CheckpointError(f"{where}: {rule}, got {quoted(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    is_name = isinstance(dtype, str) and dtype.isidentifier() and len(dtype) <= _MAX_DTYPE
    if not is_name or not _are_sizes(shape) or not _is_possible(shape):
        raise CheckpointError(f"{where}: bad dtype {quoted(dtype)} or shape {quoted(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: bad data_offsets {quoted(offsets)}")
    entry = Entry(key, dtype, tuple(shape), path, start + offsets[0], start + offsets[1])
    if dtype in TORCH_DTYPES:  # others have no known size; they fail later if anything needs them
        num_bytes = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
        if num_bytes != entry.num_bytes:
            rule = f"{dtype} {shape} takes {num_bytes} bytes, its offsets give {entry.num_bytes}"
            raise CheckpointError(f"{where}: {rule}")
    return entry


def _is_possible(shape: list[int]) -> bool:
    """Whether PyTorch could have a tensor of this shape; strides count a size of 0 as 1."""
    return len(shape) <= _MAX_DIMENSIONS and math.prod(max(size, 1) for size in shape) < 1 << 63


def _are_sizes(value: Any) -> bool:
    """Whether value is a list of sizes that PyTorch can count; a bool is no size."""
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in value)


def _whole(
    path: Path, entries: list[Entry], start: int, file_bytes: int
) -> tuple[list[Entry], list[str]]:
    """Return the entries without gaps from start on, and a sentence for each other entry."""
    whole, problems, position = [], [], start
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.end > file_bytes:
            problems.append(
                f"{entry}: truncated: its bytes end at {entry.end}, the file has {file_bytes}; "
                "fetch the file again"
            )
        elif entry.begin != position:
            problems.append(
                f"{entry}: corrupt header: bytes start at {entry.begin}, expected {position}"
            )
        else:
            whole.append(entry)
        position = entry.end
    if position != file_bytes and not problems:
        problems.append(
            f"{path}: corrupt: the header describes {position} bytes, the file has {file_bytes}"
        )
    return whole, problems
