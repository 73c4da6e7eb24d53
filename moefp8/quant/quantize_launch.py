"""Launch `quantize.cu`, which quantizes to E4M3, on a Hopper GPU."""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import MIN_AMAX, ceil_div, num_blocks, round_up
from ..kernels.common.checks import INPUTS
from ..kernels.common.divisor import Divisor
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch, Source, current_driver, pointers, struct_of

_SOURCE = Path(__file__).with_name("quantize.cu")
_Arguments = struct_of(_SOURCE)
_VECTOR_BYTES = 16  # a thread loads as many at once, if they are aligned
_MAX_TILES = 2**31 - 2**10  # `Divisor` is right for these and for the idle threads behind them
Quantized = tuple[torch.Tensor, torch.Tensor]  # data, scale_inv


class Cut(NamedTuple):
    """How a kernel is cut: `lanes` threads hold `rows` rows of a block, a CTA has `threads`."""

    rows: int
    lanes: int
    threads: int


_FEW_ROWS = Cut(1, 16, 128)  # a thread has few elements, so that many SMs work
# It takes 9.5 instructions for a BF16 element, and `_FEW_ROWS` 20 (SASS): an H200 issues 20 while
# the bytes of an element move. Each thread has 128 B in flight.
_MANY_ROWS = Cut(4, 8, 128)
BLOCK_ROWS = Cut(128, 256, 256)  # 128x128: a CTA holds a block
_THREADS_PER_SM = 2048


def cut_1x128(num_rows: int, num_k_blocks: int, num_sms: int) -> Cut:
    """The cut for `num_rows` rows, of all matrices together."""
    num_threads = num_rows * num_k_blocks * _FEW_ROWS.lanes
    if num_threads > num_sms * _THREADS_PER_SM:
        return _MANY_ROWS
    share = round_up(ceil_div(num_threads, num_sms), 32)
    return _FEW_ROWS._replace(threads=min(_FEW_ROWS.threads, share))


def kernel_of(cut: Cut, dtype: torch.dtype, vectorized: bool) -> Kernel:
    """vectorized: eight elements can be loaded at once."""
    flag = str(vectorized).lower()
    if cut == BLOCK_ROWS:
        return Kernel(_SOURCE, f"quantize_128x128_kernel<{INPUTS[dtype]}, {flag}>")
    return Kernel(
        _SOURCE, f"quantize_1x128_kernel<{INPUTS[dtype]}, {cut.rows}, {cut.lanes}, {flag}>"
    )


def needed_kernels(dtype: torch.dtype, max_rows: int, k: int, num_sms: int) -> list[Kernel]:
    """The kernels of 1x128 for up to `max_rows` rows, which may lie anywhere."""
    cuts = (_FEW_ROWS, cut_1x128(max_rows, num_blocks(k), num_sms))
    return list(dict.fromkeys(x for cut in cuts for x in kernels_of_cut(cut, dtype, k)))


def kernels_of_cut(cut: Cut, dtype: torch.dtype, k: int) -> list[Kernel]:
    """The kernels for K columns that may lie anywhere."""
    flags = (True, False) if k % 8 == 0 else (False,)
    return [kernel_of(cut, dtype, flag) for flag in flags]


def launch_quantize(
    x: torch.Tensor,
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    ue8m0: bool,
    cut: Cut | None,
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
        address = x.data_ptr()
        options = scale_inv.stride(-1), ue8m0, cut
        key = ("quantize", layout_of(x), address % _VECTOR_BYTES, *options[1:], min_amax)
        launch = prepared(key, lambda: prepare_quantize(x, *options, min_amax=min_amax))
        launch.on(x.get_device(), (address, data.data_ptr(), scale_inv.data_ptr()))
    return data, scale_inv


def prepare_quantize(
    x: torch.Tensor,
    scale_pitch: int,
    ue8m0: bool,
    cut: Cut | None,
    sources: tuple[Source, Source, Source] = (Source(0), Source(1), Source(2)),
    *,
    min_amax: float = MIN_AMAX,
) -> Launch:
    """The launch for x [rows, K] or [matrices, rows, K], whose layout and alignment count.

    scale_pitch: the distance from one k-block's scales to the next, in elements.
    cut: as in `launch_quantize`.
    sources: the addresses of x, data and scales.
    """
    driver, device_index = current_driver(), x.get_device()
    x = x[(None,) * (3 - x.ndim)]
    num_matrices, num_rows, k = x.shape
    matrix_bytes, row_bytes, _ = (stride * x.element_size() for stride in x.stride())
    num_k_blocks = num_blocks(k)
    if cut is None:
        cut = cut_1x128(num_matrices * num_rows, num_k_blocks, driver.num_sms(device_index))
    num_row_tiles = ceil_div(num_rows, cut.rows)
    num_tiles = num_matrices * num_row_tiles * num_k_blocks
    if max(num_tiles, num_rows) > _MAX_TILES:
        raise ValueError(
            f"quantize: one call takes at most {_MAX_TILES} rows and tiles, got {list(x.shape)}, "
            f"{num_tiles} tiles; split the tensor"
        )
    arguments = _Arguments(
        matrix_bytes=matrix_bytes,
        row_bytes=row_bytes,
        k=k,
        pitch=scale_pitch,
        num_matrices=num_matrices,
        num_rows=num_rows,
        num_k_blocks=Divisor.of(num_k_blocks),
        num_row_tiles=Divisor.of(num_row_tiles),
        ue8m0=ue8m0,
        min_amax=min_amax,
    )
    vectorized = k % 8 == 0 and not any(
        step % _VECTOR_BYTES for step in (x.data_ptr(), matrix_bytes, row_bytes)
    )
    of_x, of_data, of_scales = sources
    return Launch(
        driver.load(kernel_of(cut, x.dtype, vectorized), device_index),
        ceil_div(num_tiles * cut.lanes, cut.threads),
        cut.threads,
        (arguments,),
        pointers(_Arguments, x=of_x, data=of_data, scale_inv=of_scales),
    )
