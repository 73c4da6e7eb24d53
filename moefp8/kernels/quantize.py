"""Quantize to E4M3 with one FP32 scale per 1x128 or 128x128 block.

`scale_inv = max(amax, 1e-4) / 448` multiplies to dequantize (DeepSeek-V3, arXiv:2412.19437,
section 3.3); `data = x / scale_inv`, rounded to the nearest even E4M3. With `ue8m0` the scale is
first rounded up to a power of two, so that no value overflows. NaN and Inf make their own block
NaN, and no other: a NaN makes its scale NaN, an Inf makes it Inf, which leaves the other elements
zeros that keep their signs. The code of a NaN is 0x7f.
"""

import ctypes
import math
import threading
from ctypes import c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange, reduce

from .blocks import (
    BLOCK,
    E4M3,
    E4M3_MAX,
    MIN_AMAX,
    ceil_div,
    empty_tma_aligned,
    num_blocks,
    round_up,
)
from .checks import FLOATS, check_tensor
from .jit import Kernel, Launch, load
from .registry import register


def _check(op: str, name: str, x: torch.Tensor, min_ndim: int, layout: str) -> None:
    check_tensor(op, name, x, FLOATS)
    if x.ndim < min_ndim:
        raise ValueError(f"{op}: {name} must be {layout}, got shape {list(x.shape)}")


def _scale_from_amax(amax: torch.Tensor, ue8m0: bool) -> torch.Tensor:
    # By a tensor: on a GPU, PyTorch divides by a number by multiplying with its reciprocal.
    scale_inv = amax.clamp(min=MIN_AMAX) / amax.new_full((), E4M3_MAX)
    if not ue8m0:
        return scale_inv
    mantissa, exponent = torch.frexp(scale_inv)  # scale_inv = mantissa * 2**exponent, 0.5 <= m < 1
    rounded_up = torch.ldexp(torch.ones_like(scale_inv), exponent)
    return torch.where((mantissa == 0.5) | ~scale_inv.isfinite(), scale_inv, rounded_up)


def _to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    # Before torch 2.12 the cast does not saturate: 448.01 may become NaN. The sign of a NaN, which
    # the cast keeps, depends on the processor and on where in its vectors the element lies.
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).nan_to_num_(nan=math.nan).to(E4M3)


def _pad_to_blocks(x: torch.Tensor, rows: bool = False) -> torch.Tensor:
    """fp32, with zeros up to a multiple of 128 columns, and of 128 rows if `rows`."""
    shape = [*x.shape[:-1], round_up(x.shape[-1], BLOCK)]
    if rows:
        shape[-2] = round_up(shape[-2], BLOCK)
    if shape == list(x.shape):
        return x.float()
    padded = x.new_zeros(shape, dtype=torch.float32)
    padded[tuple(slice(size) for size in x.shape)] = x
    return padded


def _quantize_1x128(x: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale_inv = _allocate_1x128(x, ue8m0)
    blocks = rearrange(_pad_to_blocks(x), "... (k_blocks block) -> ... k_blocks block", block=BLOCK)
    scale_inv.copy_(_scale_from_amax(blocks.abs().amax(dim=-1), ue8m0))
    quantized = _to_e4m3(blocks / scale_inv[..., None])
    data.copy_(quantized.flatten(-2)[..., : x.shape[-1]])
    return data, scale_inv


def _allocate_1x128(x: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Check, then allocate data and scales. Also the fake body."""
    _check("quantize_1x128", "x", x, 1, "[..., K]")
    data = torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    *rows, k = x.shape
    scale_inv = empty_tma_aligned([*(rows or [1]), num_blocks(k)], x.device)
    return data, scale_inv if rows else scale_inv[0]


def _matrices(x: torch.Tensor) -> torch.Tensor:
    """x [..., N, K] as [B, N, K]; a view where x is contiguous."""
    return x[None] if x.ndim == 2 else x.flatten(0, -3)


def _quantize_128x128(w: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale_inv = _allocate_128x128(w, ue8m0)
    n, k = w.shape[-2:]
    # One matrix at a time: the FP32 copies of all experts at once would not fit.
    all_matrices = (_matrices(w), _matrices(data), _matrices(scale_inv))
    for matrix, matrix_data, matrix_scale_inv in zip(*all_matrices, strict=True):
        padded = _pad_to_blocks(matrix, rows=True)
        amax = reduce(padded.abs(), "(nb r) (kb c) -> nb kb", "max", r=BLOCK, c=BLOCK)
        matrix_scale_inv.copy_(_scale_from_amax(amax, ue8m0))
        blocks = rearrange(padded, "(nb r) (kb c) -> nb r kb c", r=BLOCK, c=BLOCK)
        quantized = _to_e4m3(blocks / matrix_scale_inv[:, None, :, None])
        matrix_data.copy_(rearrange(quantized, "nb r kb c -> (nb r) (kb c)")[:n, :k])
    return data, scale_inv


def _allocate_128x128(w: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Check, then allocate data and scales. Also the fake body."""
    _check("quantize_128x128", "w", w, 2, "[..., N, K]")
    *batch, n, k = w.shape
    data = torch.empty_like(w, dtype=E4M3, memory_format=torch.contiguous_format)
    scale_shape = [*batch, num_blocks(n), num_blocks(k)]
    return data, torch.empty(scale_shape, dtype=torch.float32, device=w.device)


# ---- On a Hopper GPU: quantize.cu ----

_SOURCE = Path(__file__).with_suffix(".cu")
_INPUTS = {
    torch.bfloat16: "Input::kBFloat16",
    torch.float16: "Input::kHalf",
    torch.float32: "Input::kFloat",
}
_VECTOR_BYTES = 16  # that a thread loads at once, if they are aligned
_MAX_TILES = 2**31 - 2**10  # `Divisor` holds for as many, and for the idle threads of the last CTA


class _Divisor(ctypes.Structure):
    """`Divisor` in quantize.cu: `n // value == n * magic >> shift` for every n below 2**31."""

    _fields_ = (("value", c_uint32), ("magic", c_uint32), ("shift", c_uint32))

    @classmethod
    def of(cls, value: int) -> "_Divisor":
        shift = 31 + (value - 1).bit_length()
        return cls(value, ceil_div(1 << shift, value), shift)


class _Arguments(ctypes.Structure):
    """`Arguments` in quantize.cu."""

    _fields_ = (
        *(("x", c_void_p), ("data", c_void_p), ("scale_inv", c_void_p)),
        *(("matrix_bytes", c_int64), ("row_bytes", c_int64), ("k", c_int64), ("pitch", c_int64)),
        *(("num_matrices", c_uint32), ("num_rows", c_uint32)),
        *(("num_k_blocks", _Divisor), ("num_row_tiles", _Divisor), ("ue8m0", c_uint32)),
    )


class Cut(NamedTuple):
    """How a kernel is cut: `lanes` threads hold `rows` rows of a block, a CTA has `threads`."""

    rows: int
    lanes: int
    threads: int


_FEW_ROWS = Cut(1, 16, 128)  # few elements for each thread: many SMs work
# 9.5 instructions for each BF16 element, `_FEW_ROWS` takes 20 (SASS); an H200 issues 20 while the
# bytes of one element move. 128 B are in flight for each thread.
_MANY_ROWS = Cut(4, 8, 128)
_BLOCK_ROWS = Cut(128, 256, 256)  # 128x128: a CTA holds a block
_THREADS_PER_SM = 2048


def cut_1x128(num_rows: int, num_k_blocks: int, num_sms: int) -> Cut:
    """For `num_rows` rows, of all matrices together."""
    num_threads = num_rows * num_k_blocks * _FEW_ROWS.lanes
    if num_threads > num_sms * _THREADS_PER_SM:
        return _MANY_ROWS
    share = round_up(ceil_div(num_threads, num_sms), 32)
    return _FEW_ROWS._replace(threads=min(_FEW_ROWS.threads, share))


def kernel_of(cut: Cut, dtype: torch.dtype, vectorized: bool) -> Kernel:
    """vectorized: elements lie such that eight can be loaded at once."""
    flag = str(vectorized).lower()
    if cut == _BLOCK_ROWS:
        return Kernel(_SOURCE, f"quantize_128x128_kernel<{_INPUTS[dtype]}, {flag}>")
    return Kernel(
        _SOURCE, f"quantize_1x128_kernel<{_INPUTS[dtype]}, {cut.rows}, {cut.lanes}, {flag}>"
    )


def kernels_of(dtype: torch.dtype) -> list[Kernel]:
    """All kernels that inputs of this dtype can need."""
    cuts = (_FEW_ROWS, _MANY_ROWS, _BLOCK_ROWS)
    return [kernel_of(cut, dtype, vectorized) for cut in cuts for vectorized in (True, False)]


def launch_quantize_1x128(
    x: torch.Tensor, ue8m0: bool, *, programmatic: bool = False, cut: Cut | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_1x128` on a Hopper GPU: one kernel on the current stream; nothing waits for it.

    programmatic: it may be launched before the stream's previous kernel ends, and then waits.
    cut: instead of that of `cut_1x128`.
    """
    data, scale_inv = _allocate_1x128(x, ue8m0)
    if data.numel():
        _launch(x, data, scale_inv, ue8m0, programmatic, cut)
    return data, scale_inv


def launch_quantize_128x128(
    w: torch.Tensor, ue8m0: bool, *, programmatic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_128x128` on a Hopper GPU, all matrices by one kernel; see the launcher above."""
    data, scale_inv = _allocate_128x128(w, ue8m0)
    if data.numel():
        _launch(w, data, scale_inv, ue8m0, programmatic, _BLOCK_ROWS)
    return data, scale_inv


class _Prepared(NamedTuple):
    """A launch whose addresses are written into `arguments` right before it is made."""

    launch: Launch
    arguments: _Arguments


class _OfThread(threading.local):
    """What this thread has prepared; no other thread may write into its arguments meanwhile."""

    def __init__(self) -> None:
        self.prepared: dict[tuple[Any, ...], _Prepared] = {}


_of_thread = _OfThread()
_MAX_PREPARED = 4096  # then all is forgotten: shapes that come and go must not fill the memory


def _launch(
    x: torch.Tensor,
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    ue8m0: bool,
    programmatic: bool,
    cut: Cut | None,
) -> None:
    x = _readable(x)
    device_index, address = x.get_device(), x.data_ptr()
    stream = _current_stream(device_index)
    place = device_index, stream, address % _VECTOR_BYTES
    key = (x.shape, x.stride(), x.dtype, ue8m0, programmatic, cut, place)
    prepared = _of_thread.prepared.get(key)
    if prepared is None:
        if len(_of_thread.prepared) >= _MAX_PREPARED:
            _of_thread.prepared.clear()
        prepared = _prepare(x, scale_inv, ue8m0, programmatic, cut, stream)
        _of_thread.prepared[key] = prepared
    launch, arguments = prepared
    arguments.x, arguments.data = address, data.data_ptr()
    arguments.scale_inv = scale_inv.data_ptr()
    if device_index == torch.cuda.current_device():
        launch()
    else:
        with torch.cuda.device(device_index):
            launch()


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x as at most three axes, the last one contiguous; a copy only where strides cannot say it."""
    if x.ndim > 3:
        x = x.flatten(0, -3)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _current_stream(device_index: int) -> int:
    """`torch.cuda.current_stream(device_index).cuda_stream`, without making an object."""
    stream: int = torch._C._cuda_getCurrentRawStream(device_index)
    return stream


def _prepare(
    x: torch.Tensor,
    scale_inv: torch.Tensor,
    ue8m0: bool,
    programmatic: bool,
    cut: Cut | None,
    stream: int,
) -> _Prepared:
    x = x[(None,) * (3 - x.ndim)]
    num_matrices, num_rows, k = x.shape
    matrix_bytes, row_bytes, _ = (stride * x.element_size() for stride in x.stride())
    num_k_blocks = num_blocks(k)
    if cut is None:
        num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
        cut = cut_1x128(num_matrices * num_rows, num_k_blocks, num_sms)
    num_row_tiles = ceil_div(num_rows, cut.rows)
    num_tiles = num_matrices * num_row_tiles * num_k_blocks
    if max(num_tiles, num_rows) > _MAX_TILES:
        raise ValueError(
            f"quantize: one call takes at most {_MAX_TILES} rows and tiles, got {list(x.shape)}, "
            f"{num_tiles} tiles; split the tensor"
        )
    arguments = _Arguments(
        *(None, None, None, matrix_bytes, row_bytes, k, scale_inv.stride(-1)),
        *(num_matrices, num_rows, _Divisor.of(num_k_blocks), _Divisor.of(num_row_tiles), ue8m0),
    )
    vectorized = k % 8 == 0 and not any(
        step % _VECTOR_BYTES for step in (x.data_ptr(), matrix_bytes, row_bytes)
    )
    function = load(kernel_of(cut, x.dtype, vectorized), x.get_device())
    grid = ceil_div(num_tiles * cut.lanes, cut.threads)
    launch = Launch(
        function, grid, cut.threads, (arguments,), stream=stream, programmatic=programmatic
    )
    return _Prepared(launch, arguments)


quantize_1x128 = register(
    "quantize_1x128(Tensor x, bool ue8m0) -> (Tensor, Tensor)",
    _quantize_1x128,
    _allocate_1x128,
    launch_quantize_1x128,
)
quantize_128x128 = register(
    "quantize_128x128(Tensor w, bool ue8m0) -> (Tensor, Tensor)",
    _quantize_128x128,
    _allocate_128x128,
    launch_quantize_128x128,
)


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_1x128` under DeepGEMM's name: x [M, K] -> (e4m3 [M, K], fp32 [M, ceil(K/128)])."""
    _check_granularity("per_token_cast_to_fp8", gran_k)
    return quantize_1x128(x, use_ue8m0)


def per_block_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_128x128` under DeepGEMM's name: x [N, K] -> (e4m3 [N, K], fp32 blocks)."""
    _check_granularity("per_block_cast_to_fp8", gran_k)
    return quantize_128x128(x, use_ue8m0)


def _check_granularity(op: str, gran_k: int) -> None:
    if gran_k != BLOCK:
        raise ValueError(
            f"{op}: gran_k must be {BLOCK}, the block size of the recipe, got {gran_k}"
        )
