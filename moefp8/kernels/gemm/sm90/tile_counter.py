"""Describe `tile_counter.cu`: a counter at zero, from which clusters of a GEMM take tiles."""

from pathlib import Path

from ...jit import Kernel
from ...program import Place, Record

SOURCE = Path(__file__).with_name("tile_counter.cu")
COUNTER_BYTES = 4
_THREADS = 32


def kernel_of() -> Kernel:
    return Kernel(SOURCE, f"tile_counter_kernel<{_THREADS}>")


def describe_tile_counter(r: Record, counter: Place, *, programmatic: bool) -> None:
    """One step that zeroes the counter, an int.

    programmatic: it may start before the stream's previous kernel ends; it writes after that end.
    """
    r.step(kernel_of(), 1, _THREADS, {"counter": counter}, programmatic=programmatic)
