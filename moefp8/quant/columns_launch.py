"""Launch `columns.cu`, whose codes of 128 tokens of a feature lie side by side, on a Hopper GPU.

T tokens, R rows that are grouped by expert, K features, E experts, B blocks.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import num_blocks
from ..kernels.common.checks import INPUTS
from ..kernels.common.divisor import Divisor
from ..kernels.jit import Kernel, Launch, Source, current_driver, pointers, struct_of

_SOURCE = Path(__file__).with_name("columns.cu")
_Arguments = struct_of(_SOURCE)
_VECTOR_BYTES = 16  # a thread loads as many at once, if they are aligned
_THREADS = 256
_MAX_TILES = 2**31 - 2**10  # `Divisor` is right for these
_MAX_PITCH = 2**32  # in bytes: the kernel multiplies 32-bit numbers


class ColumnsSources(NamedTuple):
    """Which addresses of a launch are those of a tensor.

    expert_offsets: None if all rows are of one expert. row_to_token: None if row r is x[r].
    row_data, row_scale_inv: None if codes along features are not wanted.
    """

    x: Source
    data: Source
    scale_inv: Source
    expert_offsets: Source | None = None
    row_to_token: Source | None = None
    row_data: Source | None = None
    row_scale_inv: Source | None = None


def kernel_of(
    dtype: torch.dtype, *, blocks: bool = False, with_rows: bool, vectorized: bool
) -> Kernel:
    """blocks: 128 features share a scale. with_rows: codes along features are written, too.
    vectorized: eight elements are loaded at once."""
    flags = ", ".join(str(flag).lower() for flag in (blocks, with_rows, vectorized))
    return Kernel(_SOURCE, f"columns_kernel<{INPUTS[dtype]}, {flags}>")


def needed_kernels(
    dtype: torch.dtype, k: int, *, blocks: bool = False, with_rows: bool
) -> list[Kernel]:
    """The kernels for rows of K features, which may lie anywhere."""
    flags = (True, False) if k % 8 == 0 else (False,)
    return [kernel_of(dtype, blocks=blocks, with_rows=with_rows, vectorized=flag) for flag in flags]


def readable(x: torch.Tensor) -> torch.Tensor:
    """x [T, K], or a copy of it if its rows are not contiguous or too far apart."""
    is_readable = x.stride(1) == 1 or x.shape[1] == 1
    return x if is_readable and _row_bytes(x) < _MAX_PITCH else x.contiguous()


def _row_bytes(x: torch.Tensor) -> int:
    """From one row to the next; 0 where there is but one."""
    return x.stride(0) * x.element_size() if len(x) > 1 else 0


def prepare_columns(
    x: torch.Tensor,
    num_rows: int,
    num_experts: int | None,
    num_column_blocks: int,
    pitch: int,
    ue8m0: bool,
    min_amax: float,
    sources: ColumnsSources,
    *,
    blocks: bool = False,
    row_pitch: int = 0,
    programmatic: bool = False,
) -> Launch:
    """The launch for x [T, K] as `readable` gives it, whose layout and alignment count.

    What `sources` name, besides x:

        data: e4m3 [B, K, 128], scale_inv: fp32 [B, pitch]; `data` begins at a multiple of 16 bytes.
        expert_offsets: int32 [E + 1]. row_to_token: int32 [R].
        row_data: e4m3 [R, K], row_scale_inv: fp32 [ceil(K/128), row_pitch]; contiguous.

    Args:
        num_rows: R, at least 1.
        num_experts: E; None without expert_offsets.
        num_column_blocks: B.
        blocks: a row of scale_inv has one scale for 128 features, not one for each.
        programmatic: it may be launched before the stream's previous kernel ends, and waits for it.

    The next kernel may start before this one ends, as with `transpose_launch.prepare_transpose`.
    """
    driver, device_index = current_driver(), x.get_device()
    num_tokens, k = x.shape
    num_k_blocks = num_blocks(k)
    num_tiles = num_column_blocks * num_k_blocks
    if max(num_tiles, num_rows, num_tokens, k) > _MAX_TILES:
        raise ValueError(
            f"quantize_128x1: one call takes at most {_MAX_TILES} rows, features and tiles of "
            f"128x128, got x {list(x.shape)}, {num_rows} rows, {num_tiles} tiles; split the tensor"
        )
    row_bytes = _row_bytes(x)
    steps = x.data_ptr(), row_bytes, k * 2
    arguments = _Arguments(
        pitch=pitch,
        row_pitch=row_pitch,
        row_bytes=row_bytes,
        k=k,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_experts=num_experts or 0,
        num_k_blocks=Divisor.of(num_k_blocks),
        ue8m0=ue8m0,
        min_amax=min_amax,
    )
    vectorized = not any(step % _VECTOR_BYTES for step in steps)
    with_rows = sources.row_data is not None
    kernel = kernel_of(x.dtype, blocks=blocks, with_rows=with_rows, vectorized=vectorized)
    return Launch(
        driver.load(kernel, device_index),
        num_tiles,
        _THREADS,
        (arguments,),
        pointers(_Arguments, **sources._asdict()),
        programmatic=programmatic,
    )
