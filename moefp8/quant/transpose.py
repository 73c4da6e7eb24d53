"""Transpose E4M3 weights for the GEMM of the gradient: dX = dY W reads W^T with N contiguous.

Each 128x128 block stays a block, so only codes move: the scales of W^T are the view `scale_inv.mT`.
E matrices [N, K] in parts of n = N / parts rows. On a Hopper GPU `transpose.cu` does it; each CTA
has a tile of 128x128.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import (
    BLOCK,
    E4M3,
    TMA_BYTES,
    ceil_div,
    divisor_of,
    round_up,
    round_up_to_tma,
)
from ..kernels.common.checks import check_rows_contiguous, check_same_device, check_tensor
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch
from ..kernels.program import Record, Target, Tensor, prepare_launch
from ..kernels.registry import Written, register_inputs
from ..kernels.targets import target_of

_OP = "transpose_codes"


class TransposeInputs(NamedTuple):
    """The arguments of `transpose_codes_into`; see there."""

    w: torch.Tensor
    parts: int
    out: Written


def _check_weights(w: torch.Tensor, parts: int) -> None:
    check_tensor(_OP, "w", w, (E4M3,))
    if w.ndim not in (2, 3):
        raise ValueError(f"{_OP}: w must be [N, K] or [E, N, K], got shape {list(w.shape)}")
    check_rows_contiguous(_OP, "w", w)
    if parts < 1 or w.shape[-2] % parts:
        raise ValueError(
            f"{_OP}: parts must be at least 1 and divide N = {w.shape[-2]}, got {parts}"
        )


def _check(inputs: TransposeInputs) -> None:
    w, parts, out = inputs
    _check_weights(w, parts)
    check_tensor(_OP, "out", out, (E4M3,), w.ndim)
    check_same_device(_OP, w=w, out=out)
    check_rows_contiguous(_OP, "out", out)
    *batch, n, k = w.shape
    *rows, columns = out.shape
    if rows != [*batch, k] or columns % parts or columns < n:
        raise ValueError(
            f"{_OP}: out must be {[*batch, k, 'columns']}, with columns a multiple of parts = "
            f"{parts} and at least N = {n}, got {list(out.shape)}"
        )


def _body(inputs: TransposeInputs) -> None:
    _check(inputs)
    copy_transposed(*inputs)


def copy_transposed(w: torch.Tensor, parts: int, out: torch.Tensor) -> None:
    """`transpose_codes_into` by PyTorch's operations."""
    n, width = w.shape[-2] // parts, out.shape[-1] // parts
    # Bytes, since FP8 has few ops of its own.
    source = w.view(torch.uint8).unflatten(-2, (parts, n))
    target = out.view(torch.uint8).unflatten(-1, (parts, width)).transpose(-2, -3)
    target[..., :n].copy_(source.mT)
    target[..., n:].zero_()


def _launch(inputs: TransposeInputs) -> None:
    """One kernel on the current stream, if `out` has elements."""
    w, parts, out = inputs
    if out.numel() == 0:
        _check(inputs)
        return
    addresses, device_index = (w.data_ptr(), out.data_ptr()), w.get_device()
    are_aligned = [x % TMA_BYTES == 0 for x in addresses]

    def prepare() -> Launch:
        _check(inputs)
        r = Record(target_of(device_index), ("w", "out"))
        describe_transpose(r, Tensor.of(w, "w"), parts, Tensor.of(out, "out"))
        return prepare_launch(r, device_index)

    key = (_OP, layout_of(w), layout_of(out), parts, *are_aligned)
    prepared(key, prepare).on(device_index, addresses)


# Writes `w` transposed into out [..., K, parts * width]: row i of part p becomes column
# p * width + i, and the columns after the n of a part become zeros.
transpose_codes_into = register_inputs(
    "transpose_codes_into", TransposeInputs, "()", reference=_body, fake=_check, kernels=_launch
)


def transpose_codes(w: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """The codes of weights, transposed for a GEMM that reads them by TMA.

    Args:
        w: e4m3 [N, K] or [E, N, K]; columns contiguous, rows and matrices at any pitch.
        parts: N is cut into this many equal parts of n rows, e.g. 2 for gate and up. If there are
            several, each begins at a whole block of the result: row i of part p becomes column
            p * round_up(n, 128) + i, and the columns between parts are zeros.

    Returns:
        e4m3 [..., K, N'], with N' = N, or parts * round_up(n, 128) of several parts. The row pitch
        is a multiple of 16 bytes, and the bytes between rows are zeros.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
    """
    _check_weights(w, parts)
    *batch, n, k = w.shape
    columns = n if parts == 1 else parts * round_up(n // parts, BLOCK)
    whole_rows = _empty_rows(w, (*batch, k, columns))
    transpose_codes_into(w, parts, whole_rows)
    return whole_rows[..., :columns]


def empty_transposed(w: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Uninitialised memory [..., K, columns] with the row pitch of `transpose_codes`."""
    return _empty_rows(w, shape)[..., : shape[-1]]


def _empty_rows(w: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Uninitialised memory as of `empty_transposed`, with the padding after each row."""
    *rows, columns = shape
    return w.new_empty(*rows, round_up_to_tma(columns, w.element_size()))


# ---- The kernel ----

_SOURCE = Path(__file__).with_name("transpose.cu")
_VECTOR_BYTES = TMA_BYTES  # bytes that a thread moves at once, if they are aligned
_TILE = 128  # rows and columns of a tile
_THREADS = 256
_SHARED_BYTES = _TILE * _TILE
_MAX_TILES = 2**31 - 2**10  # `Divisor` takes n < 2**31; threads count past the last column


def kernel_of(*, vectorized: bool) -> Kernel:
    """vectorized: sixteen codes can be moved at once."""
    return Kernel(_SOURCE, f"transpose_kernel<{str(vectorized).lower()}>")


def transpose_kernels(target: Target, k: int) -> Iterator[Kernel]:
    """The kernels for weights of K columns, at any addresses."""
    for alignment in (TMA_BYTES, 1):
        r = Record(target, ("w", "out"))
        w = Tensor.contiguous("w", 1, k, dtype=E4M3, alignment=alignment)
        describe_transpose(r, w, 1, Tensor.contiguous("out", k, _TILE, dtype=E4M3))
        yield from r.kernels


def describe_transpose(
    r: Record, w: Tensor, parts: int, out: Tensor, *, programmatic: bool = False
) -> None:
    """One step: row i of part p of w becomes column p * width + i of out.

    The next kernel may start before this one ends. A programmatic GEMM reads its weights before it
    waits for this kernel, so `out` must not be its weights.

    Args:
        w: [N, K] or [E, N, K], one byte each, columns contiguous.
        parts: divides N.
        out: [K, parts * width] or [E, K, parts * width], columns contiguous, with at least one
            byte; n <= width, and columns of a part after its n become zeros.
        programmatic: it may start before the stream's previous kernel ends; it reads and writes
            after that end.

    Raises:
        ValueError: there are more tiles, rows or columns than a kernel can count.
    """
    w_matrix_pitch, w_row_pitch = pitches_of(w)
    out_matrix_pitch, out_row_pitch = pitches_of(out)
    num_rows, k, width = w.shape[-2] // parts, w.shape[-1], out.shape[-1] // parts
    num_k_tiles, num_row_tiles = ceil_div(k, _TILE), ceil_div(width, _TILE)
    num_matrices = w.shape[0] if w.ndim == 3 else 1
    num_tiles = num_matrices * parts * num_row_tiles * num_k_tiles
    if max(num_tiles, width, k) > _MAX_TILES:
        raise ValueError(
            f"transpose_codes: one call takes at most {_MAX_TILES} tiles of {_TILE}x{_TILE}, rows "
            f"and columns, got {list(w.shape)}, {num_tiles} tiles; split the tensor"
        )
    arguments = {
        "w": w.place,
        "out": out.place,
        "w_matrix_pitch": w_matrix_pitch,
        "w_part_pitch": num_rows * w_row_pitch,
        "w_row_pitch": w_row_pitch,
        "out_matrix_pitch": out_matrix_pitch,
        "out_row_pitch": out_row_pitch,
        "num_rows": num_rows,
        "k": k,
        "width": width,
        "num_k_tiles": divisor_of(num_k_tiles),
        "num_row_tiles": divisor_of(num_row_tiles),
        "num_parts": divisor_of(parts),
    }
    steps = w_matrix_pitch, w_row_pitch, k, out_matrix_pitch, out_row_pitch, width
    is_even = not any(x % _VECTOR_BYTES for x in steps)
    r.step(
        kernel_of(vectorized=w.is_aligned and out.is_aligned and is_even),
        num_tiles,
        _THREADS,
        arguments,
        programmatic=programmatic,
        shared_bytes=_SHARED_BYTES,
    )


def pitches_of(x: Tensor) -> tuple[int, int]:
    """The bytes from one matrix to the next, and from one row to the next; 0 if there is one."""
    if x.ndim == 2:
        x = x.batched()
    matrix, row = (x.bytes_of_stride(i) if x.shape[i] > 1 else 0 for i in (0, 1))
    return matrix, row
