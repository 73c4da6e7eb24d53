"""Launch `gemm.cu`, the dense FP8 GEMM, on a Hopper GPU.

A launch is prepared once for each set of addresses and strides; after that, a call costs the host
one look-up and one call of the driver. What a plan says depends on no address, so that new
addresses cost little more: their tensor maps.
"""

import ctypes
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import gemm_config
from .blocks import E4M3, TMA_BYTES, ceil_div, num_blocks, round_up_to_tma, tma_aligned
from .checks import check_dense_gemm
from .gemm_config import GemmConfig
from .jit import Function, Kernel, Launch, current_stream, load, tensor_map, tensor_map_array

_OP = "fp8_gemm_nt"
_SOURCE = Path(__file__).with_name("gemm.cu")
_BIASES = {
    torch.float32: "kFloat",
    torch.bfloat16: "kBFloat16",
    torch.float16: "kHalf",
}
_MAX_SIZE = 2**31 - 2**10  # coordinates are int, also those of the last tile's end

_Operands = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None
]  # a, a_scale_inv, b, b_scale_inv, d, bias
_Layouts = tuple[Any, ...]  # shape, strides, dtype and device of every operand
_Box = tuple[torch.dtype, tuple[int, int], tuple[int], tuple[int, int], int, int]


class _Arguments(ctypes.Structure):
    """`Arguments` in gemm_tile.cuh."""

    _fields_ = (
        ("weight_scales", c_void_p),
        *(("weight_scale_stride", c_int64), ("weight_scale_stride_k", c_int64)),
        ("bias", c_void_p),
        *(("num_weights", c_int), ("num_k_blocks", c_int)),
        *(("last_token", c_int), ("stage_bytes", c_int)),
        *(("num_row_tiles", c_int), ("num_col_tiles", c_int)),
        *(("band", c_int), ("inverse", c_int64), ("programmatic", c_int)),
    )


class _Plan(NamedTuple):
    """All of a launch but the addresses and the stream."""

    layouts: _Layouts
    function: Function
    grid_and_block: tuple[int, int]
    shared_bytes: int
    cluster: int
    a_box: _Box
    a_scale_box: _Box
    b_boxes: list[_Box]
    d_box: _Box
    b_scale_strides: tuple[int, ...]
    sizes: tuple[int, ...]  # from num_weights on in _Arguments


# Dictionaries whose entries never change: threads may share them.
_plans: dict[Any, _Plan] = {}
_launches: dict[Any, Launch] = {}
_MAX_KEPT = 4096  # then all is forgotten: addresses that come and go must not fill the memory

_max_sms: int | None = None


def set_num_sms(num_sms: int | None) -> None:
    """Let `fp8_gemm_nt` run on at most `num_sms` SMs of a GPU, in this process; None: on all.

    For what runs beside it, communication for instance. More than a GPU has means all of them.

    Raises:
        ValueError: `num_sms` is below 1.
    """
    global _max_sms
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"set_num_sms: num_sms must be at least 1, or None for all, got {num_sms}")
    _max_sms = num_sms


def get_num_sms() -> int:
    """The limit of `set_num_sms`; without one, as many SMs as the current GPU has.

    Raises:
        RuntimeError: there is neither a limit nor a GPU.
    """
    if _max_sms is not None:
        return _max_sms
    if not torch.cuda.is_available():
        raise RuntimeError("get_num_sms: there is no GPU, and set_num_sms has set no limit")
    return _device_sms(torch.cuda.current_device())


def _device_sms(device_index: int) -> int:
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def launch_gemm(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    programmatic: bool = False,
    d_is_padded: bool = False,
) -> None:
    """`fp8_gemm_nt` on a Hopper GPU: one kernel on the current stream; nothing waits for it.

    Operands that TMA cannot address are copied first, and d is written through a copy: `_fitting`.

    programmatic: it may be launched before the stream's previous kernel ends; then it reads a, its
        scales and writes d only after that end. All else must be older than that kernel. Has no
        effect where an operand is copied.
    d_is_padded: up to the next 16 bytes, what follows a row of d may be written.
    Raises TypeError, ValueError as `fp8_gemm_nt`, JitError, or OutOfMemoryError.
    """
    tensors = [a, a_scale_inv, b, b_scale_inv, d]
    if bias is not None:
        tensors.append(bias)
    layouts = tuple([(x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors])
    addresses = tuple([x.data_ptr() for x in tensors])
    device_index = layouts[0][3]
    stream = current_stream(device_index)
    rest = (d_is_padded, _max_sms)
    key = (layouts, addresses, stream, programmatic, rest)
    launch = _launches.get(key)
    if launch is None:
        plan = _plans.get((layouts, rest))
        if plan is None or not _aligned(addresses):
            operands = a, a_scale_inv, b, b_scale_inv, d, bias
            _launch_unplanned(operands, layouts, rest, programmatic)
            return
        launch = _prepare(plan, addresses, stream, programmatic)
        # With the plan's own layouts: what thousands of keys hold, the garbage collector walks.
        key = (plan.layouts, addresses, stream, programmatic, rest)
        _keep(_launches, key, launch)
    launch.on(device_index)


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    if len(kept) >= _MAX_KEPT:
        kept.clear()
    kept[key] = value


@torch.no_grad()
def _launch_unplanned(
    operands: _Operands, layouts: _Layouts, rest: tuple[bool, int | None], programmatic: bool
) -> None:
    """Check; then make a plan for these layouts, or bring the operands into others."""
    check_dense_gemm(_OP, *operands)
    a, _, _, _, d, bias = operands
    if d.numel() == 0:
        return
    if a.shape[1] == 0:
        d.zero_() if bias is None else d.copy_(bias)
        return
    d_is_padded, max_sms = rest
    fitting = _fitting(*operands, d_is_padded)
    if all(x is y for x, y in zip(fitting, operands, strict=True)):
        _keep(_plans, (layouts, rest), _plan(operands, layouts, max_sms))
        launch_gemm(*operands, programmatic=programmatic, d_is_padded=d_is_padded)
    elif fitting[4] is d:
        launch_gemm(*fitting, d_is_padded=d_is_padded)
    else:
        launch_gemm(*fitting, d_is_padded=True)
        d.copy_(fitting[4])


def _fitting(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor | None,
    d_is_padded: bool,
) -> _Operands:
    """Each operand itself, or a copy in memory that TMA can address; for d an empty twin.

    The contract of TMA: addresses and row pitches are multiples of 16 bytes, and rows do not
    overlap; scales of activations lie as `empty_tma_aligned` says. `a` from `quantize_1x128` is
    copied if 16 does not divide K, `d` if 8 does not divide N. A bias is contiguous.
    """
    if not _fits(a):
        a = _empty_fitting(a).copy_(a)
    if not _fits(b):
        b = _empty_fitting(b).copy_(b)
    if not _fits(a_scale_inv.T):
        a_scale_inv = tma_aligned(a_scale_inv)
    if bias is not None:
        bias = bias.contiguous()
    # A store moves whole units of 16 bytes, also at the end of a row.
    ends_even = d.shape[1] * d.element_size() % TMA_BYTES == 0
    if not (_fits(d) and (ends_even or d_is_padded)):
        d = _empty_fitting(d)
    return a, a_scale_inv, b, b_scale_inv, d, bias


def _fits(x: torch.Tensor) -> bool:
    """Whether TMA can address x [rows, columns], of which the columns are contiguous."""
    columns = x.shape[1]
    if columns > 1 and x.stride(1) != 1:
        return False
    pitch = _pitch(x)
    aligned = not (pitch * x.element_size() % TMA_BYTES or x.data_ptr() % TMA_BYTES)
    return aligned and pitch >= columns


def _pitch(x: torch.Tensor) -> int:
    """From one row of x to the next, in elements; what a single row says of its stride is void."""
    return x.stride(0) if x.shape[0] > 1 else round_up_to_tma(x.shape[1], x.element_size())


def _empty_fitting(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    return x.new_empty(rows, round_up_to_tma(columns, x.element_size()))[:, :columns]


def _aligned(addresses: tuple[int, ...]) -> bool:
    a, a_scale_inv, b, _, d, *_ = addresses
    return (a | a_scale_inv | b | d) % TMA_BYTES == 0


def _plan(operands: _Operands, layouts: _Layouts, max_sms: int | None) -> _Plan:
    """For operands that fit."""
    a, a_scale_inv, b, b_scale_inv, d, bias = operands
    (m, k), n, device_index = a.shape, b.shape[0], a.get_device()
    if max(m, n, k) > _MAX_SIZE:
        raise ValueError(f"{_OP}: M, N and K must be at most {_MAX_SIZE}, got {m}, {n} and {k}")
    all_sms = _device_sms(device_index)
    num_sms = min(all_sms, max_sms or all_sms)
    config = gemm_config.choose_config(m, n, k, num_sms, num_sms == all_sms)
    function = load(kernel_of(config, bias), device_index)
    num_tiles = ceil_div(m, config.tile[0]), ceil_div(n, config.tile[1])
    num_row_tiles, num_col_tiles = reversed(num_tiles) if config.weights_are_rows else num_tiles
    # A GPU fills idle SMs first: where SMs are to be left idle, each CTA counts as one.
    num_ctas = num_sms if num_sms < all_sms else num_sms * config.ctas_per_sm
    band = min(_band(config, m, k), num_row_tiles)
    clusters = _num_clusters(config, num_row_tiles * num_col_tiles, num_ctas)
    # A row of an operand is read 128 bytes at a time. Where memory is what counts, no more at once.
    l2_bytes = 128 if m <= 64 else 256
    store_columns = config.store_box[0]
    return _Plan(
        layouts,
        function,
        (clusters * config.cluster, config.threads),
        config.shared_bytes,
        config.cluster,
        _box(a, E4M3, (128, config.token_box(m)), 128, l2_bytes),
        _box(a_scale_inv.T, torch.float32, (config.cta_tile[0], config.depth), 0),
        [_box(b, E4M3, (128, box), 128, l2_bytes) for box in config.weight_boxes],
        # 16 bytes of a row are one unit of the swizzle.
        _box(d, torch.bfloat16, config.store_box, store_columns * 2 if store_columns > 8 else 0),
        b_scale_inv.stride(),
        (
            *(n, num_blocks(k), config.last_token(m), config.stage_bytes(m)),
            *(num_row_tiles, num_col_tiles, band, ceil_div(1 << 33, band)),
        ),
    )


def kernel_of(config: GemmConfig, bias: torch.Tensor | None) -> Kernel:
    kind = "kNone" if bias is None else _BIASES[bias.dtype]
    return Kernel(_SOURCE, config.kernel_name(kind))


def _num_clusters(config: GemmConfig, num_tiles: int, num_ctas: int) -> int:
    """One for each tile if CTAs divide K; else as many as run at a time, and these walk."""
    if config.split > 1:
        return num_tiles
    return min(num_tiles, max(1, num_ctas // config.cluster))


def _band(config: GemmConfig, m: int, k: int) -> int:
    """Row tiles that are walked together, before the next column tiles.

    All, if the L2 cache can hold the tokens while the weights stream past; else about 512 tokens,
    so that what the CTAs that run at once read is few tokens and few weights. 128 at most: the
    kernel divides by multiplying, which is exact while band^2 * num_col_tiles <= 2^33.
    """
    if config.weights_are_rows:
        return 1
    tokens = config.tile[0]
    return min(ceil_div(m, tokens), 128) if m * k <= 24 << 20 else max(1, 512 // tokens)


def _box(
    x: torch.Tensor,
    dtype: torch.dtype,
    box: tuple[int, int],
    swizzle_bytes: int,
    l2_bytes: int = 256,
) -> _Box:
    """What `tensor_map` needs beside the address, to move boxes (columns, rows) of x."""
    rows, columns = x.shape
    pitch = _pitch(x) * x.element_size()
    return dtype, (columns, rows), (pitch,), box, swizzle_bytes, l2_bytes


def _prepare(plan: _Plan, addresses: tuple[int, ...], stream: int, programmatic: bool) -> Launch:
    a, a_scale_inv, b, b_scale_inv, d, *bias = addresses
    maps = (
        *(tensor_map(a, *plan.a_box), tensor_map(a_scale_inv, *plan.a_scale_box)),
        tensor_map_array([tensor_map(b, *box) for box in plan.b_boxes]),
        tensor_map(d, *plan.d_box),
    )
    arguments = _Arguments(
        *(b_scale_inv, *plan.b_scale_strides, bias[0] if bias else None),
        *(*plan.sizes, programmatic),
    )
    return Launch(
        plan.function,
        *plan.grid_and_block,
        (*maps, arguments),
        stream=stream,
        shared_bytes=plan.shared_bytes,
        cluster=plan.cluster,
        programmatic=programmatic,
    )
