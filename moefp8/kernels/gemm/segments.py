"""Describe `segments.cu`: a list of the segments of R rows, each a run of rows of one group."""

from pathlib import Path

from ..common.blocks import BLOCK, ceil_div
from ..jit import Kernel
from ..program import Place, Record

SOURCE = Path(__file__).with_name("segments.cu")
_ENTRY_BYTES = 16
ZERO_OF_LIST = 4  # bytes from the beginning of the list to an int that is zero: a tile counter
_THREADS = 1024


def most_segments(num_rows: int) -> int:
    """How many segments there may be: each begins with a block of rows."""
    return ceil_div(num_rows, BLOCK)


def list_bytes(num_rows: int) -> int:
    """The size of the list that the kernel writes: the number of segments, and each of them."""
    return _ENTRY_BYTES * (1 + most_segments(num_rows))


def kernel_of(num_threads: int = _THREADS) -> Kernel:
    return Kernel(SOURCE, f"segments_kernel<{num_threads}>")


def describe_segments(
    r: Record,
    group_of_row: Place,
    segments: Place,
    num_rows: int,
    num_groups: int,
    *,
    programmatic: bool,
    num_threads: int = _THREADS,
) -> None:
    """One step that writes the list of segments.

    group_of_row: `grouped_layout`, int32 [R], contiguous.
    segments: `list_bytes` of memory, at a multiple of 16 bytes.
    programmatic: it may start before the stream's previous kernel ends; it reads and writes after
        that end.
    num_threads: of its one CTA.
    """
    arguments = {
        "group_of_row": group_of_row,
        "list": segments,
        "num_rows": num_rows,
        "num_groups": num_groups,
    }
    r.step(
        kernel_of(num_threads),
        1,
        num_threads,
        arguments,
        programmatic=programmatic,
        shared_bytes=8 * (num_threads + 2) + 4 * 32,
    )
