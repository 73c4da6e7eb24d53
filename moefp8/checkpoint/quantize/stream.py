"""Write one shard of FP8 weights from the files of another checkpoint, in little memory.

A thread takes one tensor at a time, and reads, quantizes and writes it in bands of rows of blocks.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ...kernels import BLOCK, E4M3, num_blocks
from ...kernels.jit.kernel import num_processors
from ...quant import quantize_128x128
from ..errors import CheckpointError, failing_as
from ..files.header import Entry, stamp_of
from ..files.reading import Files, open_files, read_into
from ..files.source import Source
from ..files.thread_pool import run_all
from .moves import Move, Piece
from .report import ErrorSums, WeightReport
from .shard_file import OUTCOME, create, write

_NUM_THREADS = 8  # each takes 25 MiB
_BAND_ELEMENTS = 1 << 19
_COLUMNS = 4096
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class _Job:
    """sources: descriptors to read from; target: where to write; entries: what it will hold.

    advance: a function to call with the bytes read.
    """

    sources: Files
    target: int
    entries: dict[str, Entry]
    device: torch.device
    advance: Callable[[int], None]

    def read(self, piece: Piece, offset: int, tensor: torch.Tensor) -> torch.Tensor:
        """Fill tensor from byte offset of piece on."""
        with failing_as(piece.entry, "reading failed", OUTCOME):
            read_into(self.sources[piece.entry.file], piece.begin + offset, tensor)
        return tensor

    def write(self, key: str, offset: int, tensor: torch.Tensor) -> None:
        write(self.target, self.entries[key], offset, tensor)


def write_shard(
    path: Path,
    moves: list[Move],
    source: Source,
    device: torch.device,
    advance: Callable[[int], None],
) -> list[WeightReport]:
    """Write path, synced, and report on its FP8 weights. advance: it takes the bytes read.

    Raises CheckpointError naming key and file; then path may exist, incomplete.
    """
    reports: dict[str, WeightReport] = {}
    with ExitStack() as stack:
        needed = [piece.entry for move in moves for piece in move.pieces]
        sources = open_files(stack, needed, source.shards, OUTCOME)
        target, entries = create(path, (output for move in moves for output in move.outputs()))
        stack.callback(os.close, target)
        job = _Job(sources, target, entries, device, advance)

        def work(moves: Iterator[Move]) -> None:
            for move in moves:
                if move.is_fp8:
                    reports[move.key] = _quantize(job, move)
                else:
                    _copy(job, move)

        # Tensors are parallel; where operations were parallel too, 2 cores took twice as long.
        num_threads = min(_NUM_THREADS, num_processors())
        run_all(moves, work, num_threads, "moefp8-quantize", serial=True)
        for read, file in sources.items():
            if stamp_of(os.fstat(file)) != source.shards[read].stamp:
                raise CheckpointError(f"{read}: changed while it was read; {OUTCOME}")
        with failing_as(path, "cannot be written", OUTCOME):
            os.fsync(target)
    return [reports[move.key] for move in moves if move.is_fp8]


def _quantize(job: _Job, move: Move) -> WeightReport:
    (data, _, _), (scale, _, grid) = move.outputs()
    k = move.shape[-1]
    scale_inv = torch.empty(grid).flatten(0, -2)
    sums = ErrorSums()
    for piece, first, band in _bands(job, move, k):
        part, row = divmod(first, move.part_rows)
        first_block = part * num_blocks(move.part_rows) + row // BLOCK
        block_rows = scale_inv[first_block:][: num_blocks(len(band))]
        with failing_as(piece.entry, "quantizing failed", OUTCOME):
            quantized = _quantize_band(band.to(job.device), block_rows, sums)
            if not block_rows.isfinite().all():  # NaN and Inf make the scale of their block so
                raise CheckpointError(
                    f"{piece.entry}: holds NaN or Inf in {move.key}; skip it, which keeps it as it "
                    "is, or fetch the file again"
                )
        job.write(data, first * k, quantized)
        job.advance(band.nbytes)
    job.write(scale, 0, scale_inv)
    return sums.report(move.key, move.shape)


def _quantize_band(band: torch.Tensor, scale_inv: torch.Tensor, sums: ErrorSums) -> torch.Tensor:
    """Make E4M3 [rows, K] on the CPU of band [rows, K]; scales go to scale_inv, errors to sums.

    Columns are taken in parts, so that their FP32 values stay in a core's cache.
    """
    data = torch.empty(band.shape, dtype=E4M3)
    for first in range(0, band.shape[1], _COLUMNS):
        w = band[:, first : first + _COLUMNS].contiguous()
        q = quantize_128x128(w)
        sums.add(w, q)
        data[:, first : first + _COLUMNS] = q.data
        scale_inv[:, first // BLOCK :][:, : num_blocks(w.shape[1])] = q.scale_inv
    return data


def _bands(job: _Job, move: Move, k: int) -> Iterator[tuple[Piece, int, torch.Tensor]]:
    """Yield (piece, number of its first row, band [rows, K]); an empty weight has none.

    A band is of one part, and has a multiple of 128 rows unless it ends a part or a piece. A piece
    that is stored transposed is read whole, and then cut.
    """
    step = max(_BAND_ELEMENTS // max(k, 1) // BLOCK, 1) * BLOCK
    begin = 0
    for piece in move.pieces:
        end = begin + piece.num_rows(k)
        stored = None
        if piece.is_transposed:
            stored = job.read(piece, 0, torch.empty(k, end - begin, dtype=piece.dtype))
        first = begin
        while first < end:
            num_rows = min(step, move.part_rows - first % move.part_rows, end - first)
            offset = first - begin
            if stored is None:
                band = torch.empty(num_rows, k, dtype=piece.dtype)
                job.read(piece, offset * k * piece.dtype.itemsize, band)
            else:
                band = stored.t()[offset : offset + num_rows]
            yield piece, first, band
            first += num_rows
        begin = end


def _copy(job: _Job, move: Move) -> None:
    (piece,) = move.pieces
    for offset in range(0, piece.num_bytes, _CHUNK_BYTES):
        chunk = torch.empty(min(_CHUNK_BYTES, piece.num_bytes - offset), dtype=torch.uint8)
        job.write(move.key, offset, job.read(piece, offset, chunk))
        job.advance(chunk.nbytes)
