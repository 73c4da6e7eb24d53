"""A launch of `gemm.cu`: what it is given, and what of that is prepared once.

A launch is prepared once for each set of addresses and strides; after that, a call costs the host
one look-up and one call of the driver. What a plan says depends on no address, so that new
addresses cost little more: their tensor maps.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..common.blocks import E4M3, TMA_BYTES, ceil_div, num_blocks, tma_aligned
from ..common.tma_operands import Box, are_aligned, box_of, empty_fitting, fits, fitting
from ..jit import Function, Kernel, Launch, current_stream, load, tensor_map, tensor_map_array
from .config import GemmConfig, Kind, usable_ctas

SOURCE = Path(__file__).with_name("gemm.cu")
BIASES = {
    None: "kNone",
    torch.float32: "kFloat",
    torch.bfloat16: "kBFloat16",
    torch.float16: "kHalf",
}
_MAX_SIZE = 2**31 - 2**10  # coordinates are int, also those of the last tile's end
_MAX_TOKEN_BOXES = 4

Layouts = tuple[Any, ...]  # shape, strides, dtype and device of every tensor


class Operands(NamedTuple):
    """Of a launch: matrices that TMA can address, 2-D, or of a grouped GEMM 3-D."""

    a: torch.Tensor
    a_scale_inv: torch.Tensor
    b: torch.Tensor
    b_scale_inv: torch.Tensor
    d: torch.Tensor


def fitting_operands(operands: Operands, d_is_padded: bool, *, keep_d: bool) -> Operands:
    """Each operand itself, or a copy in memory that TMA can address; for d a twin.

    Scales of activations lie as `empty_tma_aligned` says. `a` from `quantize_1x128` is copied if
    16 does not divide K, `d` if 8 does not divide N. keep_d: not all of d will be written.
    """
    a, a_scale_inv, b, b_scale_inv, d = operands
    if not fits(a_scale_inv.mT):
        a_scale_inv = tma_aligned(a_scale_inv)
    # A store moves whole units of 16 bytes, also at the end of a row.
    ends_even = d.shape[-1] * d.element_size() % TMA_BYTES == 0
    if not (fits(d) and (ends_even or d_is_padded)):
        d = empty_fitting(d).copy_(d) if keep_d else empty_fitting(d)
    return Operands(fitting(a), a_scale_inv, fitting(b), b_scale_inv, d)


class Groups(ctypes.Structure):
    """`Groups` in tile.cuh."""

    _fields_ = (
        *(("bounds", c_void_p), ("num_groups", c_int), ("num_segments", c_int)),
        *(("num_tokens", c_int), ("expected_tiles", c_int)),
        ("weight_scale_stride", c_int64),
        *(("d", c_void_p), ("d_row_stride", c_int64), ("d_matrix_stride", c_int64)),
        *(("bounds_are_old", c_int), ("taken", c_void_p)),
    )


class Activation(ctypes.Structure):
    """`Activation` in tile.cuh."""

    _fields_ = (
        *(("up_scales", c_void_p), ("limit", c_float)),
        *(("scales", c_void_p), ("pitch", c_int64)),
    )


class Arguments(ctypes.Structure):
    """`Arguments` in tile.cuh."""

    _fields_ = (
        ("weight_scales", c_void_p),
        *(("weight_scale_stride", c_int64), ("weight_scale_stride_k", c_int64)),
        ("bias", c_void_p),
        *(("num_weights", c_int), ("num_k_blocks", c_int)),
        *(("last_token", c_int), ("stage_bytes", c_int * _MAX_TOKEN_BOXES)),
        *(("num_row_tiles", c_int), ("num_col_tiles", c_int)),
        *(("band", c_int), ("inverse", c_int64), ("programmatic", c_int)),
        *(("groups", Groups), ("activation", Activation)),
    )


class Plan(NamedTuple):
    """All of a launch but the addresses and the stream."""

    layouts: Layouts
    function: Function
    grid_and_block: tuple[int, int]
    shared_bytes: int
    cluster: int
    a_boxes: list[Box]
    a_scale_box: Box
    b_boxes: list[Box]
    d_box: Box
    b_scale_strides: tuple[int, ...]
    sizes: tuple[Any, ...]  # from num_weights to inverse in `Arguments`
    groups: tuple[int, ...] | None  # from num_groups to weight_scale_stride in `Groups`
    d_strides: tuple[int, ...]
    bounds_are_old: bool


def make_plan(
    config: GemmConfig,
    operands: Operands,
    bias: torch.dtype | None,
    layouts: Layouts,
    *,
    num_sms: int,
    all_sms: int,
    token_tiles: int,
    tokens: int,
    kind: Kind | None = None,
    groups: tuple[int, ...] | None = None,
    bounds_are_old: bool = False,
) -> Plan:
    """num_sms, of all_sms: that may be busy. token_tiles: at most. tokens: of a group, about.

    If `config.gate_up`, b and its scales are gate's, and d is E4M3.
    """
    a, a_scale_inv, b, b_scale_inv, d = operands
    (m, k), n = a.shape[-2:], b.shape[-2]
    function = load(kernel_of(config, bias, kind), a.get_device())
    weight_tiles = config.weight_tiles(n)
    num_tiles = token_tiles, weight_tiles
    num_row_tiles, num_col_tiles = reversed(num_tiles) if config.weights_are_rows else num_tiles
    num_ctas = usable_ctas(config, num_sms, num_sms == all_sms)
    num_band = min(band(config, tokens, k), token_tiles)
    clusters = _num_clusters(config, token_tiles * weight_tiles, num_ctas)
    # A row of an operand is read 128 bytes at a time. Where memory is what counts, no more at once.
    l2_bytes = 128 if tokens <= 64 else 256
    store_columns, size = config.store_box[0], d.element_size()
    boxes = config.token_boxes(m)
    stage_bytes = [config.stage_bytes(box) for box in boxes]
    return Plan(
        layouts,
        function,
        (clusters * config.cluster, config.threads),
        config.shared_bytes,
        config.cluster,
        [box_of(a, E4M3, (128, box), 128, l2_bytes) for box in boxes],
        box_of(a_scale_inv.mT, torch.float32, (config.token_scales, config.depth), 0),
        [box_of(b, E4M3, (128, box), 128, l2_bytes) for box in config.weight_boxes],
        # 16 bytes of a row are one unit of the swizzle.
        box_of(d, d.dtype, config.store_box, store_columns * size if store_columns > 8 else 0),
        b_scale_inv.stride()[-2:],
        (
            *(n, num_blocks(k), config.last_token(m)),
            (c_int * _MAX_TOKEN_BOXES)(*stage_bytes),
            *(num_row_tiles, num_col_tiles, num_band, ceil_div(1 << 33, num_band)),
        ),
        groups,
        (d.stride(-2), d.stride(0)),
        bounds_are_old,
    )


def check_sizes(op: str, m: int, n: int, k: int) -> None:
    if max(m, n, k) > _MAX_SIZE:
        raise ValueError(f"{op}: M, N and K must be at most {_MAX_SIZE}, got {m}, {n} and {k}")


def kernel_of(config: GemmConfig, bias: torch.dtype | None, kind: Kind | None = None) -> Kernel:
    return Kernel(SOURCE, config.kernel_name(BIASES[bias], kind), config.interleaving)


def _num_clusters(config: GemmConfig, num_tiles: int, num_ctas: int) -> int:
    """One for each tile if CTAs divide K; else as many as run at a time, and these walk."""
    if config.split > 1:
        return num_tiles
    return min(num_tiles, max(1, num_ctas // config.cluster))


def band(config: GemmConfig, m: int, k: int) -> int:
    """Tiles of tokens that are walked together, before the next tiles of weights.

    All, if the L2 cache can hold the tokens while the weights stream past; else about 512 tokens,
    so that what the CTAs that run at once read is few tokens and few weights. 128 at most: the
    kernel divides by multiplying, which is exact while band^2 * num_col_tiles <= 2^33. A grouped
    GEMM has an order of its own, and no bands.
    """
    tokens = config.tile[0]
    if config.weights_are_rows or config.grouped:
        return 1
    return min(ceil_div(m, tokens), 128) if m * k <= 24 << 20 else max(1, 512 // tokens)


class GateUp(NamedTuple):
    """What a GEMM with `config.gate_up` takes besides: addresses, limit, and the scales' pitch."""

    up: int
    up_scale_inv: int
    limit: float
    d_scale_inv: int
    d_scale_pitch: int


def prepare(
    plan: Plan,
    addresses: tuple[int, ...],
    stream: int,
    programmatic: bool,
    gate_up: GateUp | None = None,
    taken: int | None = None,
) -> Launch:
    """taken: the address of a zero that becomes the count of tiles that were taken, see `Groups` in
    tile.cuh.
    """
    a, a_scale_inv, b, b_scale_inv, d, *rest = addresses
    weights = [b] * len(plan.b_boxes) if gate_up is None else [b, gate_up.up]
    of_weights = zip(weights, plan.b_boxes, strict=True)
    maps = (
        tensor_map_array([tensor_map(a, *box) for box in plan.a_boxes]),
        tensor_map(a_scale_inv, *plan.a_scale_box),
        tensor_map_array([tensor_map(address, *box) for address, box in of_weights]),
        tensor_map(d, *plan.d_box),
    )
    bias = rest[0] if rest and plan.groups is None else None
    arguments = Arguments(
        *(b_scale_inv, *plan.b_scale_strides, bias),
        *(*plan.sizes, programmatic),
    )
    if plan.groups is not None:
        arguments.groups = Groups(
            rest[0], *plan.groups, d, *plan.d_strides, plan.bounds_are_old, taken
        )
    if gate_up is not None:
        arguments.activation = Activation(*gate_up[1:])
    return Launch(
        plan.function,
        *plan.grid_and_block,
        (*maps, arguments),
        stream=stream,
        shared_bytes=plan.shared_bytes,
        cluster=plan.cluster,
        programmatic=programmatic,
    )


class Launches:
    """The launches of one kind of GEMM that were prepared so far.

    Both dictionaries are forgotten when they are full: addresses that come and go must not fill
    the memory. Their entries never change, so threads may share them.
    """

    max_kept = 4096

    def __init__(self) -> None:
        self.plans: dict[Any, Plan] = {}
        self.prepared: dict[Any, Launch] = {}

    def launch(self, tensors: Sequence[torch.Tensor], rest: Any, programmatic: bool) -> Layouts:
        """On the current stream; if there is no plan, nothing, and the layouts that need one.

        tensors: the operands, and the bias or what tells the groups.
        rest: whatever else decides a plan.
        """
        layouts = tuple([(x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors])
        addresses = tuple([x.data_ptr() for x in tensors])
        device_index = layouts[0][3]
        stream = current_stream(device_index)
        key = (layouts, addresses, stream, programmatic, rest)
        launch = self.prepared.get(key)
        if launch is None:
            plan = self.plans.get((layouts, rest))
            a, a_scale_inv, b, _, d, *_ = addresses
            if plan is None or not are_aligned((a, a_scale_inv, b, d)):
                return layouts
            launch = prepare(plan, addresses, stream, programmatic)
            # With the plan's own layouts: what thousands of keys hold, the garbage collector walks.
            key = (plan.layouts, addresses, stream, programmatic, rest)
            self._keep(self.prepared, key, launch)
        launch.on(device_index)
        return ()

    def keep(self, plan: Plan, rest: Any) -> None:
        self._keep(self.plans, (plan.layouts, rest), plan)

    def _keep(self, kept: dict[Any, Any], key: Any, value: Any) -> None:
        if len(kept) >= self.max_kept:
            kept.clear()
        kept[key] = value


# ---- How many SMs may be busy ----

_max_sms: int | None = None


def set_num_sms(num_sms: int | None) -> None:
    """Let GEMMs run on at most `num_sms` SMs of a GPU, in this process; None: on all.

    For what runs beside them, communication for instance. More than a GPU has means all of them.

    Raises:
        TypeError: `num_sms` is neither an int nor None.
        ValueError: `num_sms` is below 1.
    """
    global _max_sms
    if num_sms is not None and (isinstance(num_sms, bool) or not isinstance(num_sms, int)):
        raise TypeError(f"set_num_sms: num_sms must be an int, or None for all, got {num_sms!r}")
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
    return device_sms(torch.cuda.current_device())


def max_sms() -> int | None:
    """The limit of `set_num_sms`."""
    return _max_sms


def busy_sms(device_index: int) -> tuple[int, int]:
    """How many SMs of a GPU may be busy, and how many it has."""
    all_sms = device_sms(device_index)
    return min(all_sms, _max_sms or all_sms), all_sms


def device_sms(device_index: int) -> int:
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)
