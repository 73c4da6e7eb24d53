"""Describe `columns.cu`, which writes codes of 128 tokens of a feature side by side.

T tokens, R rows that are grouped by expert, K features, E experts, B blocks.
"""

from pathlib import Path
from typing import Any

import torch

from ..kernels.common.blocks import TMA_BYTES, num_blocks
from ..kernels.common.checks import INPUTS
from ..kernels.common.divisor import divisor_of
from ..kernels.jit import Kernel
from ..kernels.program import Codes, Place, Record, Tensor

_SOURCE = Path(__file__).with_name("columns.cu")
_VECTOR_BYTES = TMA_BYTES  # a thread loads as many at once, if they are aligned
_THREADS = 256
_MAX_TILES = 2**31 - 2**10  # `Divisor` is right for these
_MAX_PITCH = 2**32  # in bytes: the kernel multiplies 32-bit numbers


def kernel_of(
    dtype: torch.dtype, *, blocks: bool = False, with_rows: bool, vectorized: bool
) -> Kernel:
    """blocks: 128 features share a scale. with_rows: codes along features are written, too.
    vectorized: eight elements are loaded at once."""
    flags = ", ".join(str(flag).lower() for flag in (blocks, with_rows, vectorized))
    return Kernel(_SOURCE, f"columns_kernel<{INPUTS[dtype]}, {flags}>")


def readable(x: torch.Tensor) -> torch.Tensor:
    """x [T, K], or a copy of it if its rows are not contiguous or too far apart."""
    is_near = len(x) <= 1 or x.stride(0) * x.element_size() < _MAX_PITCH
    return x if is_near and (x.stride(1) == 1 or x.shape[1] == 1) else x.contiguous()


def describe_columns(
    r: Record,
    x: Tensor,
    columns: Codes,
    num_rows: int,
    *,
    num_experts: int | None = None,
    expert_offsets: Place | None = None,
    row_to_token: Place | None = None,
    rows: Codes | None = None,
    ue8m0: bool = False,
    min_amax: float,
    blocks: bool = False,
    programmatic: bool = False,
) -> None:
    """One step that writes column codes of rows, and codes along features if they are wanted.

    The next kernel may start before this one ends, as with `describe_transpose`.

    Args:
        x: [T, K], as `readable` gives it.
        columns: e4m3 [B, K, 128], contiguous, at a multiple of 16 bytes; fp32 [B, K], or with
            `blocks` [B, ceil(K/128)].
        num_rows: R, at least 1.
        num_experts: E; None: all rows are of one.
        expert_offsets: int32 [E + 1]; None without experts.
        row_to_token: int32 [R]; None: row r is x[r].
        rows: e4m3 [R, K], contiguous; fp32 [R, ceil(K/128)], rows innermost.
        blocks: 128 features share a scale of columns.
        programmatic: it may start before the stream's previous kernel ends; it reads and writes
            after that end.

    Raises:
        ValueError: there are more rows, features or tiles than a kernel can count.
    """
    num_tokens, k = x.shape
    num_k_blocks = num_blocks(k)
    num_tiles = columns.data.shape[0] * num_k_blocks
    if max(num_tiles, num_rows, num_tokens, k) > _MAX_TILES:
        raise ValueError(
            f"quantize_128x1: one call takes at most {_MAX_TILES} rows, features and tiles of "
            f"128x128, got x {list(x.shape)}, {num_rows} rows, {num_tiles} tiles; split the tensor"
        )
    row_bytes = x.bytes_of_stride(0) if num_tokens > 1 else 0
    arguments: dict[str, Any] = {
        "x": x.place,
        "expert_offsets": expert_offsets,
        "row_to_token": row_to_token,
        "data": columns.data.place,
        "scale_inv": columns.scale_inv.place,
        "pitch": columns.scale_inv.strides[0],
        "row_bytes": row_bytes,
        "k": k,
        "num_tokens": num_tokens,
        "num_rows": num_rows,
        "num_experts": num_experts or 0,
        "num_k_blocks": divisor_of(num_k_blocks),
        "ue8m0": ue8m0,
        "min_amax": min_amax,
    }
    if rows is not None:
        arguments |= {
            "row_data": rows.data.place,
            "row_scale_inv": rows.scale_inv.place,
            "row_pitch": rows.scale_inv.strides[-1],
        }
    vectorized = x.is_aligned and not any(step % _VECTOR_BYTES for step in (row_bytes, k * 2))
    r.step(
        kernel_of(x.dtype, blocks=blocks, with_rows=rows is not None, vectorized=vectorized),
        num_tiles,
        _THREADS,
        arguments,
        programmatic=programmatic,
    )
