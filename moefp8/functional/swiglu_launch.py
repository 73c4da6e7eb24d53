"""Launch `swiglu.cu` on a Hopper GPU. R rows, I intermediate."""

from pathlib import Path

import torch

from ..kernels.common.blocks import ceil_div, round_up
from ..kernels.jit import Kernel, Launch, Source, current_driver, pointers, struct_of

_SOURCE = Path(__file__).with_name("swiglu.cu")
_Arguments = struct_of(_SOURCE)
_WARP, _MAX_THREADS, _COLUMNS = 32, 256, 8


def kernel_of() -> Kernel:
    return Kernel(_SOURCE, "swiglu_kernel")


def prepare_swiglu(gate_up: torch.Tensor, limit: float) -> Launch:
    """The launch that reads gate_up at the first address and writes what is activated at the next.

    Args:
        gate_up: bf16 [R, 2, I] as `empty_gate_up` says; the result lies in rows of the same pitch.
        limit: that of `swiglu`; infinite if there is none.

    It may be launched before the stream's previous kernel ends, and waits for it.
    """
    num_rows, _, size = gate_up.shape
    return Launch(
        current_driver().load(kernel_of(), gate_up.get_device()),
        num_rows,
        min(_MAX_THREADS, round_up(ceil_div(size, _COLUMNS), _WARP)),
        (_Arguments(row_bytes=2 * gate_up.stride(1), size=size, limit=limit),),
        pointers(_Arguments, gate_up=Source(0), activated=Source(1)),
        programmatic=True,
    )
