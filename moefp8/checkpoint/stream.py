"""Write one shard of FP8 weights from the files of another checkpoint, in little memory.

A thread takes a tensor at a time, and reads, quantizes and writes it in bands of blocks of rows.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..kernels import BLOCK, E4M3, num_blocks
from ..kernels.jit.kernel import num_processors
from ..quant import quantize_128x128
from .choose import Move
from .errors import CheckpointError
from .header import TORCH_DTYPES, Entry, stamp_of
from .pool import run_all
from .read import Files, open_files
from .report import ErrorSums, WeightReport
from .shard_file import OUTCOME, create, lay_out, write
from .source import Source
from .staging import read_into

_NUM_THREADS = 8  # of 25 MiB each
_BAND_ELEMENTS = 1 << 19
_COLUMNS = 4096
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class _Job:
    """sources: descriptors to read from; target: to write to; entries: what it will hold."""

    sources: Files
    target: int
    entries: dict[str, Entry]
    device: torch.device


def write_shard(
    path: Path,
    moves: list[Move],
    source: Source,
    device: torch.device,
    advance: Callable[[int], None],
) -> list[WeightReport]:
    """Write path, synced; report its FP8 weights. advance: told the bytes that were read.

    Raises CheckpointError naming key and file; then path may exist, incomplete.
    """
    header, entries = lay_out(path, (output for move in moves for output in move.outputs()))
    reports: dict[str, WeightReport] = {}
    with ExitStack() as stack:
        sources = open_files(stack, [move.entry for move in moves], source.shards, OUTCOME)
        target = create(path, header)
        stack.callback(os.close, target)
        job = _Job(sources, target, entries, device)

        def work(moves: Iterator[Move]) -> None:
            for move in moves:
                if move.is_fp8:
                    reports[move.key] = _quantize(job, move, advance)
                else:
                    _copy(job, move, advance)

        # Tensors are what is parallel; with operations that are too, 2 cores took twice as long.
        num_threads = min(_NUM_THREADS, num_processors())
        run_all(moves, work, num_threads, "moefp8-quantize", serial=True)
        _check_unchanged(sources, source)
        _finish(target, path)
    return [reports[move.key] for move in moves if move.is_fp8]


def _quantize(job: _Job, move: Move, advance: Callable[[int], None]) -> WeightReport:
    data, scale = (job.entries[key] for key, _, _ in move.outputs())
    n, k = move.matrix()
    dtype = TORCH_DTYPES[move.entry.dtype]
    scale_inv = torch.empty(num_blocks(n), num_blocks(k))
    sums = ErrorSums()
    for first, rows in _bands(n, k):
        band = torch.empty(rows, k, dtype=dtype)
        _read(job, move, first * k * dtype.itemsize, band)
        block_rows = scale_inv[first // BLOCK :][: num_blocks(rows)]
        with _telling(move.entry, "quantizing"):
            quantized = _quantize_band(band.to(job.device), block_rows, sums)
            if not block_rows.isfinite().all():  # NaN and Inf make the scale of their block so
                raise CheckpointError(f"{move.entry}: holds NaN or Inf in {move.key}")
        write(job.target, data, first * k, quantized)
        advance(band.nbytes)
    write(job.target, scale, 0, scale_inv)
    return sums.report(move.key, move.shape)


def _quantize_band(band: torch.Tensor, scale_inv: torch.Tensor, sums: ErrorSums) -> torch.Tensor:
    """band [rows, K] -> E4M3 [rows, K] on the CPU; scales go to scale_inv, errors to sums.

    Some columns at a time: what is made of them in FP32 stays in a core's cache.
    """
    data = torch.empty(band.shape, dtype=E4M3)
    for first in range(0, band.shape[1], _COLUMNS):
        w = band[:, first : first + _COLUMNS].contiguous()
        q = quantize_128x128(w)
        sums.add(w, q)
        data[:, first : first + _COLUMNS] = q.data
        scale_inv[:, first // BLOCK :][:, : num_blocks(w.shape[1])] = q.scale_inv
    return data


def _bands(n: int, k: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows), each but the last a multiple of 128; none of an empty weight."""
    step = max(_BAND_ELEMENTS // max(k, 1) // BLOCK, 1) * BLOCK
    for first in range(0, n if k else 0, step):
        yield first, min(step, n - first)


def _copy(job: _Job, move: Move, advance: Callable[[int], None]) -> None:
    for offset in range(0, move.num_bytes, _CHUNK_BYTES):
        chunk = torch.empty(min(_CHUNK_BYTES, move.num_bytes - offset), dtype=torch.uint8)
        _read(job, move, offset, chunk)
        write(job.target, job.entries[move.key], offset, chunk)
        advance(chunk.nbytes)


def _read(job: _Job, move: Move, offset: int, tensor: torch.Tensor) -> None:
    with _telling(move.entry, "reading"):
        read_into(job.sources[move.entry.file], move.begin + offset, tensor)


@contextmanager
def _telling(entry: Entry, what: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, EOFError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{entry}: {what} failed ({error}); {OUTCOME}") from error


def _check_unchanged(files: Files, source: Source) -> None:
    for path, file in files.items():
        if stamp_of(os.fstat(file)) != source.shards[path].stamp:
            raise CheckpointError(f"{path}: changed while it was read; {OUTCOME}")


def _finish(target: int, path: Path) -> None:
    try:
        os.fsync(target)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}); {OUTCOME}") from error
