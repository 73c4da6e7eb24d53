"""Describe `swiglu.cu`. R rows, I intermediate."""

from pathlib import Path

from ..kernels.common.blocks import ceil_div, round_up
from ..kernels.jit import Kernel
from ..kernels.program import Place, Record, Tensor

_SOURCE = Path(__file__).with_name("swiglu.cu")
_WARP, _MAX_THREADS, _COLUMNS = 32, 256, 8


def kernel_of() -> Kernel:
    return Kernel(_SOURCE, "swiglu_kernel")


def describe_swiglu(r: Record, gate_up: Tensor, activated: Place, limit: float) -> None:
    """One step: `swiglu` of gate and up. It waits for the step before it.

    Args:
        gate_up: bf16 [R, 2, I] as `empty_gate_up` says.
        activated: bf16 [R, I], in rows of the same pitch.
        limit: that of `swiglu`; infinite if there is none.
    """
    num_rows, _, size = gate_up.shape
    r.step(
        kernel_of(),
        num_rows,
        min(_MAX_THREADS, round_up(ceil_div(size, _COLUMNS), _WARP)),
        {
            "gate_up": gate_up.place,
            "activated": activated,
            "row_bytes": gate_up.bytes_of_stride(1),
            "size": size,
            "limit": limit,
        },
        programmatic=True,
    )
