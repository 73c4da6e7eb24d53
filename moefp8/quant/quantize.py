"""Quantize to E4M3 with one FP32 scale per 1x128 or 128x128 block: the ops and their kernels.

Numerics are those of `numerics.py`; the kernels for Hopper GPUs are in `quantize.cu`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import (
    E4M3,
    MIN_AMAX,
    MIN_GRADIENT_AMAX,
    TMA_BYTES,
    ceil_div,
    divisor_of,
    empty_tma_aligned,
    num_blocks,
    round_up,
)
from ..kernels.common.checks import FLOATS, INPUTS, check_tensor
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch
from ..kernels.program import (
    Codes,
    Record,
    Span,
    Target,
    Tensor,
    kernels_at_any_address,
    prepare_launch,
)
from ..kernels.registry import register
from ..kernels.targets import target_of
from . import numerics

Quantized = tuple[torch.Tensor, torch.Tensor]  # data, scale_inv


class QuantizeCut(NamedTuple):
    """How a kernel is cut: `lanes` threads hold `rows` rows of a block; a CTA has `threads`."""

    rows: int
    lanes: int
    threads: int


def _check(op: str, name: str, x: torch.Tensor, min_ndim: int, layout: str) -> None:
    check_tensor(op, name, x, FLOATS)
    if x.ndim < min_ndim:
        raise ValueError(f"{op}: {name} must be {layout}, got shape {list(x.shape)}")


def _allocate_1x128(x: torch.Tensor, ue8m0: bool, min_amax: float = MIN_AMAX) -> Quantized:
    """Check, then allocate data and scales. Also the fake body."""
    _check("quantize_1x128", "x", x, 1, "[..., K]")
    data = torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    *rows, k = x.shape
    scale_inv = empty_tma_aligned([*(rows or [1]), num_blocks(k)], x.device)
    return data, scale_inv if rows else scale_inv[0]


def _quantize_1x128(x: torch.Tensor, ue8m0: bool, min_amax: float = MIN_AMAX) -> Quantized:
    _check("quantize_1x128", "x", x, 1, "[..., K]")
    return numerics.quantize_1x128(x, ue8m0, min_amax)


def _allocate_128x128(w: torch.Tensor, ue8m0: bool) -> Quantized:
    """Check, then allocate data and scales. Also the fake body."""
    _check("quantize_128x128", "w", w, 2, "[..., N, K]")
    *batch, n, k = w.shape
    data = torch.empty_like(w, dtype=E4M3, memory_format=torch.contiguous_format)
    scale_shape = [*batch, num_blocks(n), num_blocks(k)]
    return data, torch.empty(scale_shape, dtype=torch.float32, device=w.device)


def _quantize_128x128(w: torch.Tensor, ue8m0: bool) -> Quantized:
    data, scale_inv = _allocate_128x128(w, ue8m0)
    for matrix, codes, scales in numerics.matrices_of(w, data, scale_inv):
        numerics.quantize_128x128_into(matrix, codes, scales, ue8m0)
    return data, scale_inv


def launch_quantize_1x128(
    x: torch.Tensor, ue8m0: bool, min_amax: float = MIN_AMAX, cut: QuantizeCut | None = None
) -> Quantized:
    """`quantize_1x128` on a Hopper GPU: one kernel on the current stream; nothing waits for it.

    cut: overrides the choice of `cut_1x128`.
    """
    return launch_quantize(x, *_allocate_1x128(x, ue8m0), ue8m0, cut, min_amax)


def launch_quantize_128x128(w: torch.Tensor, ue8m0: bool) -> Quantized:
    """`quantize_128x128` on a Hopper GPU: likewise, one kernel for all matrices."""
    return launch_quantize(w, *_allocate_128x128(w, ue8m0), ue8m0, BLOCK_ROWS)


quantize_1x128 = register(
    "quantize_1x128(Tensor x, bool ue8m0, float min_amax=1e-4) -> (Tensor, Tensor)",
    _quantize_1x128,
    _allocate_1x128,
    launch_quantize_1x128,
)
quantize_gradient_1x128 = register(
    "quantize_gradient_1x128(Tensor grad) -> (Tensor, Tensor)",
    lambda grad: _quantize_1x128(grad, False, MIN_GRADIENT_AMAX),
    lambda grad: _allocate_1x128(grad, False),
    lambda grad: launch_quantize_1x128(grad, False, MIN_GRADIENT_AMAX),
)
"""`quantize_1x128` with `MIN_GRADIENT_AMAX`, for traced gradients: with dynamic shapes, Dynamo of
torch 2.8 would pass that float in place of another argument."""

quantize_128x128 = register(
    "quantize_128x128(Tensor w, bool ue8m0) -> (Tensor, Tensor)",
    _quantize_128x128,
    _allocate_128x128,
    launch_quantize_128x128,
)


# ---- The kernels ----

_SOURCE = Path(__file__).with_name("quantize.cu")
_VECTOR_BYTES = TMA_BYTES  # bytes that a thread loads at once, if they are aligned
_MAX_TILES = 2**31 - 2**10  # `Divisor` takes n < 2**31; idle threads count past the last tile

_FEW_ROWS = QuantizeCut(1, 16, 128)  # a thread has few elements, so that many SMs work
# `_MANY_ROWS` takes 9.5 instructions for a BF16 element, `_FEW_ROWS` 20 (SASS). An H200 issues 20
# while it moves the element's bytes. Each thread has 128 B in flight.
_MANY_ROWS = QuantizeCut(4, 8, 128)
BLOCK_ROWS = QuantizeCut(128, 256, 256)  # 128x128: a CTA holds a block
_THREADS_PER_SM = 2048


def cut_1x128(num_rows: int, num_k_blocks: int, num_sms: int) -> QuantizeCut:
    """The cut for `num_rows` rows, of all matrices together."""
    if num_rows > most_few_rows(num_k_blocks, num_sms):
        return _MANY_ROWS
    num_threads = num_rows * num_k_blocks * _FEW_ROWS.lanes
    share = round_up(ceil_div(num_threads, num_sms), 32)
    return _FEW_ROWS._replace(threads=min(_FEW_ROWS.threads, share))


def most_few_rows(num_k_blocks: int, num_sms: int) -> int:
    """The largest number of rows that gets `_FEW_ROWS`."""
    return num_sms * _THREADS_PER_SM // (num_k_blocks * _FEW_ROWS.lanes)


def kernel_of(cut: QuantizeCut, dtype: torch.dtype, vectorized: bool) -> Kernel:
    """vectorized: eight elements can be loaded at once."""
    flag = str(vectorized).lower()
    if cut == BLOCK_ROWS:
        return Kernel(_SOURCE, f"quantize_128x128_kernel<{INPUTS[dtype]}, {flag}>")
    return Kernel(
        _SOURCE, f"quantize_1x128_kernel<{INPUTS[dtype]}, {cut.rows}, {cut.lanes}, {flag}>"
    )


def quantize_kernels(
    target: Target, dtype: torch.dtype, most_rows: int, k: int, cut: QuantizeCut | None = None
) -> Iterator[Kernel]:
    """The kernels for up to `most_rows` rows of K columns, at any addresses; cut: as in
    `launch_quantize`."""

    def describe(span: Span, alignment: int) -> Record:
        r = Record(target, ("x",), span=span)
        x = Tensor.contiguous("x", span.first, k, dtype=dtype, alignment=alignment)
        describe_quantize(r, x, r.codes("rows", (1, span.first, k)).first(), cut)
        return r

    return kernels_at_any_address(describe, most_rows, dtype.itemsize)


def launch_quantize(
    x: torch.Tensor,
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    ue8m0: bool,
    cut: QuantizeCut | None,
    min_amax: float = MIN_AMAX,
) -> Quantized:
    """Quantize x into data and scale_inv, by one kernel on the current stream if x has elements.

    cut: `BLOCK_ROWS` for 128x128 blocks, any other for 1x128; None: `cut_1x128` chooses.
    """
    if data.numel():
        if x.ndim > 3:
            x = x.flatten(0, -3)
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            x = x.contiguous()
        address, device_index = x.data_ptr(), x.get_device()
        key = ("quantize", layout_of(x), address % _VECTOR_BYTES, ue8m0, cut, min_amax)

        def prepare() -> Launch:
            r = Record(target_of(device_index), ("x", "out", "out_scales"))
            out = Codes.of(data, scale_inv, "out")
            describe_quantize(r, Tensor.of(x, "x"), out, cut, ue8m0=ue8m0, min_amax=min_amax)
            return prepare_launch(r, device_index)

        prepared(key, prepare).on(device_index, (address, data.data_ptr(), scale_inv.data_ptr()))
    return data, scale_inv


def describe_quantize(
    r: Record,
    x: Tensor,
    out: Codes,
    cut: QuantizeCut | None,
    *,
    ue8m0: bool = False,
    min_amax: float = MIN_AMAX,
    programmatic: bool = False,
) -> None:
    """One step that writes the codes and scales of x, as `quantize_1x128` makes them.

    Args:
        x: [rows, K] or [matrices, rows, K], columns contiguous; it has elements.
        out: contiguous codes of x; the last stride of 1x128 scales is from one k-block to the next,
            and 128x128 scales are contiguous.
        cut: as in `launch_quantize`.
        programmatic: it may start before the stream's previous kernel ends; it reads and writes
            after that end.

    Raises:
        ValueError: there are more rows or tiles than a kernel can count.
    """
    while x.ndim < 3:
        x = x.batched()
    num_matrices, num_rows, k = x.shape
    matrix_bytes, row_bytes = x.bytes_of_stride(0), x.bytes_of_stride(1)
    num_k_blocks = num_blocks(k)
    if cut is None:
        all_rows, num_sms = num_matrices * num_rows, r.target.num_sms
        cut = cut_1x128(all_rows, num_k_blocks, num_sms)
        if cut.rows == _FEW_ROWS.rows:
            r.hold(all_rows, lambda _: most_few_rows(num_k_blocks, num_sms))
    num_row_tiles = ceil_div(num_rows, cut.rows)
    num_tiles = num_matrices * num_row_tiles * num_k_blocks
    if max(num_tiles, num_rows) > _MAX_TILES:
        raise ValueError(
            f"quantize: one call takes at most {_MAX_TILES} rows and tiles, got {list(x.shape)}, "
            f"{num_tiles} tiles; split the tensor"
        )
    arguments = {
        "x": x.place,
        "data": out.data.place,
        "scale_inv": out.scale_inv.place,
        "matrix_bytes": matrix_bytes,
        "row_bytes": row_bytes,
        "k": k,
        "pitch": out.scale_inv.strides[-1],
        "num_matrices": num_matrices,
        "num_rows": num_rows,
        "num_k_blocks": divisor_of(num_k_blocks),
        "num_row_tiles": divisor_of(num_row_tiles),
        "ue8m0": ue8m0,
        "min_amax": min_amax,
    }
    is_even = not (matrix_bytes % _VECTOR_BYTES or row_bytes % _VECTOR_BYTES)
    vectorized = k % 8 == 0 and x.is_aligned and is_even
    r.step(
        kernel_of(cut, x.dtype, vectorized),
        ceil_div(num_tiles * cut.lanes, cut.threads),
        cut.threads,
        arguments,
        programmatic=programmatic,
    )
