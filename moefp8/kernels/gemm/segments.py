"""Launch `segments.cu`: which of R rows that lie side by side are of one group."""

from pathlib import Path

from ..common.blocks import BLOCK, ceil_div
from ..jit import Kernel, Launch, Source, current_driver, pointers, struct_of

SOURCE = Path(__file__).with_name("segments.cu")
Arguments = struct_of(SOURCE)
_ENTRY_BYTES = 16
ZERO_OF_LIST = 4  # bytes from its beginning to an int that is zero, for a tile counter
_THREADS = 1024


def most_segments(num_rows: int) -> int:
    """How many segments there may be: each begins with a block of rows."""
    return ceil_div(num_rows, BLOCK)


def list_bytes(num_rows: int) -> int:
    """The size of the list that the kernel writes: the number of segments, and each of them."""
    return _ENTRY_BYTES * (1 + most_segments(num_rows))


def kernel_of(num_threads: int = _THREADS) -> Kernel:
    return Kernel(SOURCE, f"segments_kernel<{num_threads}>")


def prepare_segments(
    num_rows: int,
    num_groups: int,
    device_index: int,
    group_of_row: Source,
    found: Source,
    *,
    programmatic: bool,
    num_threads: int = _THREADS,
) -> Launch:
    """A launch that writes the list of segments.

    group_of_row: `grouped_layout`, int32 [R], contiguous.
    found: `list_bytes` of memory, at a multiple of 16 bytes.
    programmatic: it may be launched before the stream's previous kernel ends; it reads and writes
        after that end.
    num_threads: of its one CTA.
    """
    return Launch(
        current_driver().load(kernel_of(num_threads), device_index),
        1,
        num_threads,
        (Arguments(num_rows=num_rows, num_groups=num_groups),),
        pointers(Arguments, group_of_row=group_of_row, list=found),
        shared_bytes=8 * (num_threads + 2) + 4 * 32,
        programmatic=programmatic,
    )
