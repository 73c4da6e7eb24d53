"""Launch `tile_counter.cu`: a counter at zero, from which clusters of a grouped GEMM take tiles."""

from pathlib import Path

from ..jit import Kernel, Launch, Source, current_driver, pointers, struct_of

SOURCE = Path(__file__).with_name("tile_counter.cu")
Arguments = struct_of(SOURCE)
COUNTER_BYTES = 4
_THREADS = 32


def kernel_of() -> Kernel:
    return Kernel(SOURCE, f"tile_counter_kernel<{_THREADS}>")


def prepare_tile_counter(device_index: int, counter: Source, *, programmatic: bool) -> Launch:
    """A launch that zeroes the counter, an int.

    programmatic: it may be launched before the stream's previous kernel ends; it writes after that
        end.
    """
    return Launch(
        current_driver().load(kernel_of(), device_index),
        1,
        _THREADS,
        (Arguments(),),
        pointers(Arguments, counter=counter),
        programmatic=programmatic,
    )
