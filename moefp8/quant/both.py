"""Quantize weights to E4M3 and transpose the codes in one pass, for the GEMMs of a trained weight.

E matrices [N, K] in parts of n = N / parts rows, e.g. 2 for gate and up; each part has blocks of
its own. Numerics are those of `numerics.py`; W^T has the layout of `transpose.py`. On a Hopper GPU
one kernel, `both.cu`, reads the weights once; each CTA has a tile of 128x128.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import (
    BLOCK,
    E4M3,
    TMA_BYTES,
    ceil_div,
    divisor_of,
    num_blocks,
    round_up,
    round_up_to_tma,
)
from ..kernels.common.checks import (
    FLOATS,
    INPUTS,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch
from ..kernels.program import Codes, Record, Target, Tensor, prepare_launch
from ..kernels.registry import Written, register_inputs
from ..kernels.targets import target_of
from . import numerics
from .transpose import copy_transposed, pitches_of

_OP = "quantize_128x128_both"


class BothInputs(NamedTuple):
    """The arguments of `quantize_128x128_both_into`: weights, and the memory that it fills.

    w: [N, K] or [E, N, K] bf16, fp16 or fp32; columns contiguous, rows and matrices at any pitch.
    parts: divides N.
    data: e4m3 of the shape of w, contiguous.
    scale_inv: fp32 [..., parts * ceil(n/128), ceil(K/128)], contiguous.
    transposed: e4m3 [..., K, parts * width], columns contiguous, n <= width <= n rounded up to 128:
        row i of part p becomes column p * width + i; columns after the n of a part become zeros.
    """

    w: torch.Tensor
    parts: int
    data: Written
    scale_inv: Written
    transposed: Written


class WeightCodes(NamedTuple):
    """E4M3 codes of weights and of their transpose, whose scales are `scale_inv.mT`.

    data: e4m3 [..., N, K], contiguous.
    scale_inv: fp32 [..., parts * ceil(n/128), ceil(K/128)], contiguous.
    transposed: e4m3 [..., K, N'], as `transpose_codes(data, parts)` lays it out.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    transposed: torch.Tensor


def _check_weights(w: torch.Tensor, parts: int) -> None:
    check_tensor(_OP, "w", w, FLOATS)
    if w.ndim not in (2, 3):
        raise ValueError(f"{_OP}: w must be [N, K] or [E, N, K], got shape {list(w.shape)}")
    check_rows_contiguous(_OP, "w", w)
    if parts < 1 or w.shape[-2] % parts:
        raise ValueError(
            f"{_OP}: parts must be at least 1 and divide N = {w.shape[-2]}, got {parts}"
        )


def _scale_shape(w: torch.Tensor, parts: int) -> list[int]:
    *batch, n, k = w.shape
    return [*batch, parts * num_blocks(n // parts), num_blocks(k)]


def _check(inputs: BothInputs) -> None:
    w, parts, data, scale_inv, transposed = inputs
    _check_weights(w, parts)
    check_same_device(_OP, w=w, data=data, scale_inv=scale_inv, transposed=transposed)
    check_tensor(_OP, "data", data, (E4M3,))
    check_shape(_OP, "data", data, w.shape, "the shape of w")
    check_tensor(_OP, "scale_inv", scale_inv, (torch.float32,))
    rule = "[..., parts * ceil(N/parts/128), ceil(K/128)]"
    check_shape(_OP, "scale_inv", scale_inv, _scale_shape(w, parts), rule)
    for name, x in (("data", data), ("scale_inv", scale_inv)):
        if not x.is_contiguous():
            raise ValueError(
                f"{_OP}: {name} must be contiguous, got strides {list(x.stride())} for shape "
                f"{list(x.shape)}"
            )
    check_tensor(_OP, "transposed", transposed, (E4M3,), w.ndim)
    check_rows_contiguous(_OP, "transposed", transposed)
    *batch, n, k = w.shape
    *rows, columns = transposed.shape
    most = parts * round_up(n // parts, BLOCK)
    if rows != [*batch, k] or columns % parts or not n <= columns <= most:
        raise ValueError(
            f"{_OP}: transposed must be {[*batch, k, 'columns']}, with columns a multiple of "
            f"parts = {parts} from N = {n} to {most}, got {list(transposed.shape)}"
        )


def _body(inputs: BothInputs) -> None:
    _check(inputs)
    w, parts, data, scale_inv, transposed = inputs
    n = w.shape[-2] // parts
    by_part = (
        x[(None,) * (3 - x.ndim)].unflatten(-2, (parts, size)).flatten(0, 1)
        for x, size in ((w, n), (data, n), (scale_inv, num_blocks(n)))
    )
    for part, codes, scales in zip(*by_part, strict=True):
        numerics.quantize_128x128_into(part, codes, scales)
    copy_transposed(data, parts, transposed)


def _launch(inputs: BothInputs) -> None:
    """One kernel on the current stream, if `w` has elements."""
    w, parts, data, scale_inv, transposed = inputs
    if w.numel() == 0:
        _check(inputs)
        return
    tensors, device_index = (w, data, scale_inv, transposed), w.get_device()
    key = (_OP, parts, *map(layout_of, tensors), *alignments(w, data, transposed))

    def prepare() -> Launch:
        _check(inputs)
        r = Record(target_of(device_index), ("w", "out", "out_scales", "transposed"))
        out = Codes.of(data, scale_inv, "out")
        describe_both(r, Tensor.of(w, "w"), parts, out, Tensor.of(transposed, "transposed"))
        return prepare_launch(r, device_index)

    prepared(key, prepare).on(device_index, tuple([x.data_ptr() for x in tensors]))


# Quantizes `w` into given memory: see `BothInputs`.
quantize_128x128_both_into = register_inputs(
    "quantize_128x128_both_into", BothInputs, "()", reference=_body, fake=_check, kernels=_launch
)


def quantize_128x128_both(w: torch.Tensor, parts: int = 1) -> WeightCodes:
    """The codes of weights and of their transpose, by one kernel that reads the weights once.

    Args:
        w: [N, K] or [E, N, K] bf16, fp16 or fp32; columns contiguous, rows and matrices at any
            pitch.
        parts: N is cut into this many equal parts, each with blocks of its own. The results equal
            those of `quantize_128x128` for each part, and of `transpose_codes` for its codes.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
    """
    both = empty_both(w, parts)
    quantize_128x128_both_into(w, parts, both.data, both.scale_inv, whole_rows(both, parts))
    return both


def empty_both(w: torch.Tensor, parts: int) -> WeightCodes:
    """Uninitialised memory for the results of `quantize_128x128_both`; raises the same errors."""
    _check_weights(w, parts)
    *batch, n, k = w.shape
    columns = n if parts == 1 else parts * round_up(n // parts, BLOCK)
    rows = w.new_empty((*batch, k, round_up_to_tma(columns, E4M3.itemsize)), dtype=E4M3)
    return WeightCodes(
        data=w.new_empty(w.shape, dtype=E4M3),
        scale_inv=w.new_empty(_scale_shape(w, parts), dtype=torch.float32),
        transposed=rows[..., :columns],
    )


def whole_rows(both: WeightCodes, parts: int) -> torch.Tensor:
    """`both.transposed` with the padding after each row, if there is one part; others have none."""
    transposed = both.transposed
    if parts > 1 or transposed.numel() == 0:
        return transposed
    shape = (*transposed.shape[:-1], transposed.stride(-2))
    return transposed.as_strided(shape, transposed.stride())


# ---- The kernel ----

_SOURCE = Path(__file__).with_name("both.cu")
_VECTOR_BYTES = TMA_BYTES  # bytes that a thread loads at once, if they are aligned
_VECTOR = 8  # elements of a load, and bytes of their codes
_TILE = 128  # rows and columns of a tile
_THREADS = 256
_SHARED_BYTES = _TILE * _TILE + _THREADS // 32 * 4
_MAX_TILES = 2**31 - 2**10  # `Divisor` takes n < 2**31; threads count past the last column


def alignments(*tensors: torch.Tensor) -> tuple[int, ...]:
    """The part of their addresses on which the choice of a kernel depends."""
    return tuple(x.data_ptr() % _VECTOR_BYTES for x in tensors)


def kernel_of(dtype: torch.dtype, *, vectorized: bool) -> Kernel:
    """vectorized: eight weights can be loaded at once, and sixteen codes stored."""
    return Kernel(_SOURCE, f"both_kernel<{INPUTS[dtype]}, {str(vectorized).lower()}>")


def both_kernels(target: Target, dtype: torch.dtype, k: int) -> Iterator[Kernel]:
    """The kernels for weights of K columns, at any addresses."""
    for alignment in (TMA_BYTES, dtype.itemsize):
        r = Record(target, ("w", "out", "out_scales", "transposed"))
        w = Tensor.contiguous("w", 1, k, dtype=dtype, alignment=alignment)
        transposed = Tensor.contiguous("transposed", k, _TILE, dtype=E4M3)
        describe_both(r, w, 1, Codes.contiguous("out", 1, k), transposed)
        yield from r.kernels


def describe_both(r: Record, w: Tensor, parts: int, out: Codes, transposed: Tensor) -> None:
    """One step that writes the codes of w, their 128x128 scales, and the codes transposed.

    Args:
        w: [N, K] or [E, N, K], of at least one element, columns contiguous.
        parts: divides N.
        out: e4m3 of the shape of w, contiguous, as the scales are.
        transposed: e4m3 [..., K, parts * width], columns contiguous, n <= width <= n rounded up to
            128.

    Raises:
        ValueError: there are more tiles, rows or columns than a kernel can count.
    """
    num_matrices, num_rows, k = w.shape[0] if w.ndim == 3 else 1, w.shape[-2] // parts, w.shape[-1]
    width = transposed.shape[-1] // parts
    w_matrix_pitch, w_row_pitch = pitches_of(w)
    matrix_pitch, row_pitch = pitches_of(transposed)
    num_k_tiles, num_row_tiles = ceil_div(k, _TILE), ceil_div(num_rows, _TILE)
    num_tiles = num_matrices * parts * num_row_tiles * num_k_tiles
    if max(num_tiles, num_rows, k) > _MAX_TILES:
        raise ValueError(
            f"quantize_128x128_both: one call takes at most {_MAX_TILES} tiles of {_TILE}x{_TILE}, "
            f"rows and columns, got {list(w.shape)}, {num_tiles} tiles; split the tensor"
        )
    arguments = {
        "w": w.place,
        "data": out.data.place,
        "scale_inv": out.scale_inv.place,
        "transposed": transposed.place,
        "w_matrix_pitch": w_matrix_pitch,
        "w_part_pitch": num_rows * w_row_pitch,
        "w_row_pitch": w_row_pitch,
        "transposed_matrix_pitch": matrix_pitch,
        "transposed_row_pitch": row_pitch,
        "num_rows": num_rows,
        "k": k,
        "width": width,
        "num_k_tiles": divisor_of(num_k_tiles),
        "num_row_tiles": divisor_of(num_row_tiles),
        "num_parts": divisor_of(parts),
    }
    steps = w_matrix_pitch, w_row_pitch, matrix_pitch, row_pitch, width
    vectorized = (
        k % _VECTOR == 0
        and w.is_aligned
        and transposed.is_aligned
        and out.data.alignment % _VECTOR == 0
        and not any(x % _VECTOR_BYTES for x in steps)
    )
    r.step(
        kernel_of(w.dtype, vectorized=vectorized),
        num_tiles,
        _THREADS,
        arguments,
        programmatic=False,
        shared_bytes=_SHARED_BYTES,
    )
