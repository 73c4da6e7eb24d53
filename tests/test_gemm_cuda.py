"""The dense GEMM on Hopper: launcher, configurations and cubins without a GPU, then on one.

Without a GPU, `Emulator` stands for libcuda: a launch computes on the CPU what the kernel would,
out of the tensor maps and arguments that it was given. A wrong address, stride or extent gives a
wrong result.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import cuda.pathfinder
import pytest
import sanitizer_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8 import FP8Linear, kernels
from moefp8.kernels import fp8_gemm_nt, gemm, gemm_config, jit, linear, registry, round_up
from moefp8.kernels import gemm_launch as room
from moefp8.kernels import quantize as quantize_room
from moefp8.kernels.jit import driver, launch, module, tma
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128
from moefp8.testing import assert_matches_reference, gemm_shapes, sizes

NAN = float("nan")
NUM_SMS = 132
KINDS = "kNone", "kFloat", "kBFloat16", "kHalf"
BIASES = None, torch.float32, torch.bfloat16, torch.float16


# ---- Matrices in memory of many kinds ----


def flat(size: int, like: torch.Tensor) -> torch.Tensor:
    """Poisoned memory: 0xff is NaN in every float of ours."""
    memory = torch.full((size * like.element_size(),), 0xFF, dtype=torch.uint8, device=like.device)
    return memory.view(like.dtype)


class Place(NamedTuple):
    """`make(x)` gives x's numbers elsewhere; `fits` says whether TMA can address that."""

    make: Callable[[torch.Tensor], torch.Tensor]
    fits: bool


def within(pad_left: int, pitch_unit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Columns `pad_left` and on of wider rows, whose pitch is a multiple of `pitch_unit`."""

    def make(x: torch.Tensor) -> torch.Tensor:
        m, n = x.shape
        width = round_up(pad_left + n + 1, pitch_unit)
        return flat((m + 2) * width, x).view(m + 2, width)[1:-1, pad_left : pad_left + n].copy_(x)

    return make


def at_odd_address(x: torch.Tensor) -> torch.Tensor:
    pitch = round_up(x.shape[1], 16)
    rows = flat(x.shape[0] * pitch + 1, x)[1:].view(x.shape[0], pitch)
    return rows[:, : x.shape[1]].copy_(x)


def every_other_row(x: torch.Tensor) -> torch.Tensor:
    return (
        flat(x.shape[0] * 2 * round_up(x.shape[1], 16), x)
        .view(2 * x.shape[0], round_up(x.shape[1], 16))[::2, : x.shape[1]]
        .copy_(x)
    )


def with_void_strides(x: torch.Tensor) -> torch.Tensor:
    """Dimensions of size 1 say anything of their strides."""
    x = within(16, 16)(x)
    strides = [7 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


PLACES = {
    "aligned columns": Place(within(16, 16), True),
    "every other row": Place(every_other_row, True),
    "void strides": Place(with_void_strides, True),
    "odd columns": Place(within(3, 1), False),
    "odd pitch": Place(within(16, 17), False),
    "odd address": Place(at_odd_address, False),
}
SCALE_PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as quantized": kernels.tma_aligned,
    "K innermost": lambda s: s.clone(memory_format=torch.contiguous_format),
    "wider": lambda s: within(8, 4)(s.T).T,
    "odd": lambda s: within(3, 1)(s.T).T,
    "steps of 2": lambda s: within(0, 2)(s.repeat_interleave(2, 1))[:, ::2],
}


def operands(
    m: int, n: int, k: int, bias: torch.dtype | None = None, device: str = "cpu"
) -> list[torch.Tensor | None]:
    """a, a_scale_inv, b, b_scale_inv, d filled with NaN, bias."""
    a, b = quantize_1x128(torch.randn(m, k)), quantize_128x128(torch.randn(n, k))
    d = torch.full((m, n), NAN, dtype=torch.bfloat16)
    made = [*a, *b, d, None if bias is None else torch.randn(n).to(bias)]
    return [x if x is None else x.to(device) for x in made]


# ---- Without a GPU: the launcher ----


class Map(NamedTuple):
    dtype: torch.dtype
    address: int
    shape: list[int]
    stride: int
    box: list[int]
    swizzle: int


def memory(address: int, dtype: torch.dtype, shape: list[int], strides: list[int]) -> torch.Tensor:
    """What lies at an address of this process."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


class Emulator:
    """libcuda, as far as launches need it."""

    def __init__(self) -> None:
        self.maps: dict[int, Map] = {}
        self.kernels: list[jit.Kernel] = []
        self.launched: list[SimpleNamespace] = []
        self.chosen: list[tuple[int, int, int, int]] = []
        self.config_of: dict[str, gemm_config.GemmConfig] = {}

    def load(self, kernel: jit.Kernel, device_index: int) -> jit.Function:
        self.kernels.append(kernel)
        return module.Function(kernel, device_index, 1, len(self.kernels), 232448)

    def cuTensorMapEncodeTiled(self, at, dtype, rank, address, shape, strides, box, *rest):
        assert rank == 2
        dtypes = {0: torch.float8_e4m3fn, 7: torch.float32, 9: torch.bfloat16}
        ones, interleave, swizzle, *_ = rest
        assert (list(ones), interleave) == ([1, 1], 0)
        dtype, swizzle = dtypes[dtype], 16 << swizzle if swizzle else 0
        assert strides[0] >= shape[0] * dtype.itemsize  # rows do not overlap
        pitch = strides[0] // dtype.itemsize
        self.maps[at] = Map(dtype, address, list(shape), pitch, list(box), swizzle)
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        config, parameters = config._obj, list(parameters)
        kernel = self.kernels[function.value - 1]
        attributes = (launch.Attribute * config.num_attributes).from_address(config.attributes or 1)
        found = {x.id: x.value[0] for x in attributes}
        made = SimpleNamespace(
            kernel=kernel,
            grid=config.grid_x,
            block=config.block_x,
            shared_bytes=config.shared_bytes,
            stream=config.stream,
            cluster=found.get(4, 1),
            programmatic=bool(found.get(6, 0)),
        )
        self.launched.append(made)
        body = self.quantize if kernel.name.startswith("quantize") else self.gemm
        body(made, parameters)
        return 0

    def quantize(self, made, parameters):
        made.arguments = x = copy_of(quantize_room._Arguments, parameters[0])
        dtype = next(
            d for d, name in quantize_room._INPUTS.items() if f"<{name}," in made.kernel.name
        )
        assert x.num_matrices == 1
        source = memory(x.x, dtype, [x.num_rows, x.k], [x.row_bytes // dtype.itemsize, 1])
        data, scale_inv = quantize_room._quantize_1x128(source, bool(x.ue8m0))
        memory(x.data, torch.float8_e4m3fn, [x.num_rows, x.k], [x.k, 1]).copy_(data)
        memory(x.scale_inv, torch.float32, list(scale_inv.shape), [1, x.pitch]).copy_(scale_inv)

    def gemm(self, made, parameters):
        config = self.config_of[made.kernel.name]
        made.row_map, made.col_map, made.scale_map, made.d_map = (
            self.maps[at] for at in parameters[:4]
        )
        made.arguments = arguments = copy_of(room._Arguments, parameters[4])
        a, b = made.row_map, made.col_map
        if config.weights_are_rows:
            a, b = b, a
        (k, m), (_, n) = a.shape, b.shape
        assert made.d_map.shape == [n, m]
        assert made.scale_map.shape == [m, kernels.num_blocks(k)]
        assert (arguments.num_weights, arguments.num_k_blocks) == (n, kernels.num_blocks(k))
        self.check_tiles(made, config, m, n)
        d, scales = made.d_map, made.scale_map
        result = gemm.block_scaled_matmul(
            memory(a.address, a.dtype, [m, k], [a.stride, 1]),
            memory(scales.address, scales.dtype, scales.shape, [1, scales.stride]),
            memory(b.address, b.dtype, [n, k], [b.stride, 1]),
            memory(
                arguments.weight_scales,
                torch.float32,
                [kernels.num_blocks(n), kernels.num_blocks(k)],
                [arguments.weight_scale_stride, arguments.weight_scale_stride_k],
            ),
        )
        kind = re.search(r"Bias::(\w+)", made.kernel.name)[1]
        assert (kind == "kNone") == (arguments.bias is None)
        if kind != "kNone":
            dtype = next(dtype for dtype, name in room._BIASES.items() if name == kind)
            result += memory(arguments.bias, dtype, [n], [1]).float()
        memory(d.address, d.dtype, [m, n], [d.stride, 1]).copy_(result)

    def check_tiles(self, made, config, m, n):
        """Every tile is walked once, and boxes are what the kernel takes them for."""
        made.config, arguments = config, made.arguments
        shared = (made.block, made.cluster, made.shared_bytes)
        assert shared == (config.threads, config.cluster, config.shared_bytes)
        sizes = (n, m) if config.weights_are_rows else (m, n)
        tile = reversed(config.tile) if config.weights_are_rows else config.tile
        counts = arguments.num_row_tiles, arguments.num_col_tiles
        assert counts == tuple(-(-size // side) for size, side in zip(sizes, tile, strict=True))
        clusters, rest = divmod(made.grid, config.cluster)
        assert rest == 0
        num_tiles = counts[0] * counts[1]
        assert clusters == num_tiles if config.split > 1 else 1 <= clusters <= num_tiles
        assert arguments.band >= 1
        tokens = config.cols if config.weights_are_rows else config.rows
        assert (made.row_map.box, made.col_map.box) == (
            [128, config.row_box],
            [128, config.col_box],
        )
        assert (made.row_map.swizzle, made.col_map.swizzle) == (128, 128)
        assert (made.scale_map.box, made.scale_map.swizzle) == ([tokens, config.depth], 0)
        assert tuple(made.d_map.box) == config.store_box
        span = config.store_box[0] * 2
        assert made.d_map.swizzle == (span if span > 16 else 0)


def copy_of(structure, address):
    return structure.from_buffer_copy(structure.from_address(address))


@contextmanager
def emulated(config: gemm_config.GemmConfig | None = None) -> Iterator[Emulator]:
    """Launches work on tensors of the CPU; config: instead of what is chosen."""
    made, choose = Emulator(), gemm_config.choose_config

    def choose_and_tell(m, n, k, num_sms, all_sms):
        made.chosen.append((m, n, k, num_sms))
        chosen = config or choose(m, n, k, num_sms, all_sms)
        made.config_of.update({chosen.kernel_name(kind): chosen for kind in KINDS})
        return chosen

    properties = SimpleNamespace(multi_processor_count=NUM_SMS)
    tma._encode.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "library", lambda: made)
        for folder in (room, quantize_room):
            patch.setattr(folder, "load", made.load)
            patch.setattr(folder, "_current_stream", lambda device_index: 7)
        patch.setattr(room, "_launches", {})
        patch.setattr(room, "_plans", {})
        patch.setattr(room, "_max_sms", None)
        patch.setattr(quantize_room, "_of_thread", quantize_room._OfThread())
        patch.setattr(gemm_config, "choose_config", choose_and_tell)
        patch.setattr(torch.cuda, "current_device", lambda: -1)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        yield made
    tma._encode.cache_clear()


@pytest.fixture
def gpu() -> Iterator[Emulator]:
    with emulated() as made:
        yield made


def expected_of(a, a_scale_inv, b, b_scale_inv, d, bias) -> torch.Tensor:
    expected = torch.empty_like(d, memory_format=torch.contiguous_format)
    gemm._body(a, a_scale_inv, b, b_scale_inv, expected, bias)
    return expected


@settings(max_examples=150)
@given(
    shape=gemm_shapes(),
    places=st.tuples(*[st.sampled_from(sorted(PLACES))] * 3),
    scale_places=st.tuples(*[st.sampled_from(sorted(SCALE_PLACES))] * 2),
    bias=st.sampled_from(BIASES),
    bias_step=st.sampled_from((1, 2)),
)
def test_every_layout_is_addressed_rightly(shape, places, scale_places, bias, bias_step):
    a, a_scale_inv, b, b_scale_inv, d, bias = operands(*shape, bias)
    expected = expected_of(a, a_scale_inv, b, b_scale_inv, d, bias)
    a, b, d = (PLACES[place].make(x) for place, x in zip(places, (a, b, d), strict=True))
    a_scale_inv, b_scale_inv = (
        SCALE_PLACES[place](x)
        for place, x in zip(scale_places, (a_scale_inv, b_scale_inv), strict=True)
    )
    if bias is not None:
        bias = bias.repeat_interleave(bias_step)[::bias_step]
    around = d.as_strided((d.untyped_storage().nbytes() // 2,), (1,), 0)
    d.fill_(0)
    before = around.clone()
    d.fill_(NAN)
    with emulated() as made:
        room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, bias)
        assert torch.equal(d, expected)
        d.fill_(0)
        assert torch.equal(around.view(torch.uint8), before.view(torch.uint8))
        assert len(made.launched) == (0 not in shape)


@pytest.mark.parametrize("place", PLACES)
def test_what_tma_can_address_is_not_copied(gpu, place):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(5, 48, 256)
    a, b, d = (PLACES[place].make(x) for x in (a, b, d))
    room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, None)
    (made,) = gpu.launched
    maps = [made.row_map, made.col_map]
    if made.config.weights_are_rows:
        maps.reverse()
    for x, its_map in zip((a, b, d), (*maps, made.d_map), strict=True):
        assert (its_map.address == x.data_ptr()) == PLACES[place].fits
    assert made.scale_map.address == a_scale_inv.data_ptr()


@pytest.mark.parametrize(
    ("place", "copied"),
    [("as quantized", False), ("wider", False), ("K innermost", True), ("odd", True)],
)
def test_scales_are_copied_only_if_they_must(gpu, place, copied):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(5, 48, 512)
    a_scale_inv, b_scale_inv = (SCALE_PLACES[place](x) for x in (a_scale_inv, b_scale_inv))
    room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, None)
    (made,) = gpu.launched
    assert (made.scale_map.address != a_scale_inv.data_ptr()) == copied
    assert made.arguments.weight_scales == b_scale_inv.data_ptr()


@pytest.mark.parametrize("stride", [0, 1, 7, 2**50])
def test_what_one_row_says_of_its_stride_is_void(gpu, stride):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(1, 8, 112)
    expected = expected_of(a, a_scale_inv, b, b_scale_inv, d, None)
    a, d = (x.as_strided(x.shape, (stride, 1)) for x in (a, d))
    a_scale_inv = a_scale_inv.as_strided((1, 1), (stride, stride))
    room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, None)
    assert torch.equal(d, expected)
    (made,) = gpu.launched
    assert {x.address for x in (made.row_map, made.col_map)} == {a.data_ptr(), b.data_ptr()}
    assert (made.d_map.address, made.scale_map.address) == (d.data_ptr(), a_scale_inv.data_ptr())


def test_addresses_are_looked_at_in_each_call(gpu):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(5, 48, 256)
    expected = expected_of(a, a_scale_inv, b, b_scale_inv, d, None)
    rows = flat(a.numel() + 16, a)
    for start in (0, 3, 16):
        moved = rows[start : start + a.numel()].view(a.shape).copy_(a)
        room.launch_gemm(moved, a_scale_inv, b, b_scale_inv, d.fill_(NAN), None)
        assert torch.equal(d, expected)
    assert len(gpu.chosen) == 1


@pytest.mark.parametrize("name", sanitizer_cases.FAMILIES)
@pytest.mark.parametrize("limit", [None, 1])
def test_every_family_is_launched_rightly(name, limit):
    config = sanitizer_cases.FAMILIES[name]
    for i, shape in enumerate(sanitizer_cases.shapes_of(config)):
        arguments = operands(*shape, BIASES[i])
        with emulated(config) as made:
            kernels.set_num_sms(limit)
            room.launch_gemm(*arguments)
        assert torch.equal(arguments[4], expected_of(*arguments))
        (launched,) = made.launched
        assert launched.config == config


def test_rows_that_overlap_are_copied(gpu):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(9, 40, 160)
    for view in (a[:1].expand(9, 160), flat(400, a).copy_(a.flatten()[:400])):
        if view.ndim == 1:
            view = view.as_strided((9, 160), (16, 1))
        expected = expected_of(view, a_scale_inv, b, b_scale_inv, d, None)
        room.launch_gemm(view, a_scale_inv, b, b_scale_inv, d, None)
        assert torch.equal(d, expected)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d[:1].expand(9, 40), None)


@pytest.mark.parametrize("bias", BIASES)
def test_nothing_is_launched_without_work(gpu, bias):
    for shape in ((0, 5, 9), (5, 0, 9), (0, 0, 0)):
        room.launch_gemm(*operands(*shape, bias))
    *arguments, d, bias = operands(5, 7, 0, bias)
    room.launch_gemm(*arguments, d, bias)
    expected = torch.zeros(5, 7) if bias is None else bias.float().expand(5, 7)
    assert torch.equal(d, expected.bfloat16())
    assert gpu.launched == []


def test_a_bias_that_wants_a_gradient_records_nothing(gpu):
    *arguments, d, bias = operands(5, 7, 0, torch.float32)
    room.launch_gemm(*arguments, d, bias.requires_grad_())
    assert not d.requires_grad


def test_a_second_call_is_one_call_of_the_driver(gpu):
    arguments = operands(5, 48, 256)
    room.launch_gemm(*arguments)
    num_maps = len(gpu.maps)
    (prepared,) = room._launches.values()
    arguments[4].fill_(NAN)
    room.launch_gemm(*arguments)
    assert len(gpu.launched) == 2
    assert (len(gpu.maps), num_maps) == (4, 4)
    assert list(room._launches.values()) == [prepared]
    assert len(gpu.chosen) == 1
    assert bool(arguments[4].isfinite().all())


def test_new_addresses_cost_their_own_maps_only(gpu):
    a, *others, _, _ = operands(5, 48, 256)
    alive = [(a.clone(), torch.empty(5, 48, dtype=torch.bfloat16)) for _ in range(3)]
    for x, d in alive:
        room.launch_gemm(x, *others, d, None)
    kept = [made.row_map for made in gpu.launched], [made.col_map for made in gpu.launched]
    weights = kept[0] if gpu.launched[0].config.weights_are_rows else kept[1]
    assert {x.address for x in weights} == {others[1].data_ptr()}
    assert len(gpu.chosen) == len(gpu.kernels) == 1
    assert len(gpu.maps) == 3 * 2 + 2  # weights and scales are found


def test_whatever_decides_a_launch_is_in_its_key(gpu, monkeypatch):
    a, a_scale_inv, b, b_scale_inv, d, bias = operands(6, 48, 256, torch.float32)
    wide = within(16, 16)(a)
    halves = torch.cat([b_scale_inv, b_scale_inv], 1)
    calls = [
        lambda: room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, None),
        lambda: room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, bias),
        lambda: room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, bias.view(torch.int32).float()),
        lambda: room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, None, programmatic=True),
        lambda: room.launch_gemm(wide, a_scale_inv, b, b_scale_inv, d, None),
        lambda: room.launch_gemm(a, a_scale_inv.clone(), b, b_scale_inv, d, None),
        lambda: room.launch_gemm(a, a_scale_inv, b, halves[:, :2], d, None),
        lambda: room.launch_gemm(a[:5], a_scale_inv[:5], b, b_scale_inv, d[:5], None),
    ]
    for number, call in enumerate(calls, 1):
        call()
        assert len(room._launches) == number
    monkeypatch.setattr(room, "_current_stream", lambda device_index: 8)
    calls[0]()
    assert gpu.launched[-1].stream == 8
    kernels.set_num_sms(3)
    calls[0]()
    assert gpu.launched[-1].grid <= max(3, gpu.launched[-1].cluster)
    assert len(room._launches) == len(calls) + 2
    for call in calls:
        call()
        call()
    assert len(gpu.launched) == 3 * len(calls) + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": lambda x: x.view(torch.uint8)}, "a must be float8_e4m3fn, got uint8"),
        ({"b": lambda x: x.view(torch.float8_e5m2)}, "b must be float8_e4m3fn, got float8_e5m2"),
        ({"d": lambda x: x.view(torch.float16)}, "d must be bfloat16, got float16"),
        ({"a_scale_inv": lambda x: x.view(torch.int32)}, "a_scale_inv must be float32"),
        ({"b_scale_inv": lambda x: x.view(torch.int32)}, "b_scale_inv must be float32"),
        ({"bias": lambda x: x.view(torch.int32)}, "bias must be bfloat16 or float16 or float32"),
        ({"d": lambda x: x.view(48, 6)}, r"d must be \[M, N\] = \[6, 48\], got \[48, 6\]"),
        ({"a": lambda x: x.as_strided((6, 256), (1, 6))}, "last dimension of a must be contig"),
        ({"bias": lambda x: x[:47]}, r"bias must be \[N\] = \[48\], got \[47\]"),
    ],
)
def test_what_was_checked_once_is_no_excuse(gpu, change, message):
    names = "a", "a_scale_inv", "b", "b_scale_inv", "d", "bias"
    arguments = dict(zip(names, operands(6, 48, 256, torch.float32), strict=True))
    room.launch_gemm(**arguments)
    ((name, view),) = change.items()
    with pytest.raises((TypeError, ValueError), match=f"^fp8_gemm_nt: .*{message}"):
        room.launch_gemm(**{**arguments, name: view(arguments[name])})
    assert len(gpu.launched) == 1


def test_what_is_kept_does_not_grow_for_ever(gpu, monkeypatch):
    monkeypatch.setattr(room, "_MAX_KEPT", 3)
    for m in range(1, 9):
        room.launch_gemm(*operands(m, 8, 16))
        assert max(len(room._launches), len(room._plans)) <= 3
    assert len(gpu.launched) == 8


def test_num_sms_limits_the_grid(gpu):
    arguments = operands(700, 640, 128)
    config = gemm_config.with_most_stages(gemm_config.GemmConfig(128, 64, 0, ctas_per_sm=2))
    with emulated(config) as made:
        for limit in (None, 1, 5, 1000):
            kernels.set_num_sms(limit)
            room.launch_gemm(*arguments)
        assert [x.grid for x in made.launched] == [60, 1, 5, 60]
        assert [sms for *_, sms in made.chosen] == [NUM_SMS, 1, 5, NUM_SMS]


def test_num_sms_is_checked_and_told(gpu, monkeypatch):
    for bad in (0, -3):
        with pytest.raises(ValueError, match=f"num_sms must be at least 1, .* got {bad}"):
            kernels.set_num_sms(bad)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.get_num_sms() == NUM_SMS
    kernels.set_num_sms(20)
    assert kernels.get_num_sms() == 20
    kernels.set_num_sms(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="there is no GPU"):
        kernels.get_num_sms()


def test_sizes_beyond_the_coordinates_are_refused():
    rows = torch.zeros(1, 16, dtype=torch.float8_e4m3fn).expand(2**31, 16)
    huge = rows, torch.zeros(1, 1).expand(2**31, 1), rows[:8], torch.zeros(1, 1)
    d = torch.zeros(1, 8, dtype=torch.bfloat16).expand(2**31, 8)
    with pytest.raises(ValueError, match=r"M, N and K must be at most .* got 2147483648, 8 and 16"):
        room._plan((*huge, d, None), (), None)


def test_the_device_is_made_current(gpu, monkeypatch):
    made_current = []

    @contextmanager
    def device(index):
        made_current.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", device)
    room.launch_gemm(*operands(3, 8, 16))
    assert made_current == [-1]


@pytest.mark.parametrize(
    "error", [jit.JitError("no usable NVRTC"), torch.cuda.OutOfMemoryError("no memory")]
)
def test_without_a_kernel_there_is_an_error(gpu, monkeypatch, error):
    def fail(kernel, device_index):
        raise error

    arguments = operands(3, 8, 16)
    with monkeypatch.context() as patch:
        patch.setattr(room, "load", fail)
        with pytest.raises(type(error), match=str(error)):
            room.launch_gemm(*arguments)
    assert bool(arguments[4].isnan().all())
    room.launch_gemm(*arguments)  # once the cause is gone
    assert len(gpu.launched) == 1


# ---- Without a GPU: the linear layer, and which body runs ----


@given(
    shape=gemm_shapes(),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    bias=st.sampled_from(BIASES),
)
def test_linear_is_two_launches(shape, dtype, bias):
    m, n, k = shape
    x, weight = torch.randn(m, k).to(dtype), quantize_128x128(torch.randn(n, k))
    bias = None if bias is None else torch.randn(n).to(bias)
    expected = linear.fp8_linear(x, *weight, bias)
    with emulated() as made:
        assert torch.equal(linear.launch_linear(x, *weight, bias), expected)
    copied = (k % 16 and max(m, n) > 1) or n % 8  # which may come in between
    if 0 not in shape:
        assert [x.programmatic for x in made.launched] == [False, not copied]


def test_linear_equals_its_parts():
    x, weight, bias = torch.randn(5, 300), quantize_128x128(torch.randn(130, 300)), torch.randn(130)
    d = torch.empty(5, 130, dtype=torch.bfloat16)
    for b in (None, bias):
        fp8_gemm_nt(quantize_1x128(x), weight, d, bias=b)
        assert torch.equal(linear.fp8_linear(x, *weight, b), d)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 300, dtype=torch.int64)}, "x must be bfloat16 or .* got int64"),
        ({"x": torch.zeros(2, 5, 300)}, r"x must have 2 dimensions, got shape \[2, 5, 300\]"),
        ({"x": torch.zeros(5, 299)}, "K must be equal in x and weight, got 299 and 300"),
        ({"weight": torch.zeros(130, 300)}, "weight must be float8_e4m3fn, got float32"),
        ({"weight_scale_inv": torch.ones(2, 2)}, r"\[ceil\(N/128\), .* = \[2, 3\], got \[2, 2\]"),
        ({"bias": torch.zeros(5)}, r"bias must be \[N\] = \[130\], got \[5\]"),
        ({"x": torch.zeros(5, 300, device="meta")}, "x on meta, weight on cpu"),
    ],
)
def test_linear_names_what_is_wrong(change, message):
    weight = quantize_128x128(torch.randn(130, 300))
    good = {"x": torch.zeros(5, 300), "weight": weight.data, "weight_scale_inv": weight.scale_inv}
    arguments = {**good, "bias": None, **change}
    for body in (linear.fp8_linear, linear.launch_linear):
        with pytest.raises((TypeError, ValueError), match=f"^fp8_linear: .*{message}"):
            body(*arguments.values())


def test_linear_agrees_with_its_fake_body():
    weight = quantize_128x128(torch.randn(130, 300))
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    op = torch.ops.moefp8.fp8_linear
    for bias in (None, torch.randn(130)):
        torch.library.opcheck(op, (torch.randn(5, 300), *weight, bias), test_utils=checks)


def test_which_body_runs(monkeypatch):
    ran = []
    bodies = [lambda x: ran.append("portable"), lambda x: ran.append("hopper")]
    x = SimpleNamespace(device=torch.device("cpu"), get_device=lambda: 0)
    on_gpu = registry._on_gpu("some_op", *bodies)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA {index}")
    for hip, capability, expected in (
        (None, (9, 0), "hopper"),
        (None, (8, 0), "portable"),
        (None, (10, 0), "portable"),
        ("7.0", (9, 4), "portable"),
    ):
        registry.runs_our_kernels.cache_clear()
        registry._announce_portable.cache_clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i, c=capability: c)
        if expected == "portable":
            with pytest.warns(UserWarning, match="some_op runs its portable .* NVIDIA 0"):
                on_gpu(x)
        on_gpu(x)
        assert ran[-1] == expected
    registry._announce_portable.cache_clear()
    monkeypatch.setenv("MOEFP8_STRICT", "1")
    with pytest.raises(RuntimeError, match="MOEFP8_STRICT=1 forbids that"):
        on_gpu(x)
    registry._announce_portable.cache_clear()
    registry.runs_our_kernels.cache_clear()


def test_deep_gemm_names():
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(130, 200, 300)
    expected = expected_of(a, a_scale_inv, b, b_scale_inv, d, None)
    kernels.gemm_fp8_fp8_bf16_nt((a, a_scale_inv), (b, b_scale_inv), d)
    assert torch.equal(d, expected)
    layout = torch.zeros(130, dtype=torch.int32)
    d.fill_(NAN)
    kernels.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(
        (a, a_scale_inv), (b[None], b_scale_inv[None]), d, layout
    )
    assert torch.equal(d, expected)
    d.fill_(NAN)
    kernels.m_grouped_gemm_fp8_fp8_bf16_nt_masked(
        (a[None], a_scale_inv[None]),
        (b[None], b_scale_inv[None]),
        d[None],
        torch.tensor([130], dtype=torch.int32),
        130,
    )
    assert torch.equal(d, expected)
    assert [kernels.get_tma_aligned_size(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert kernels.get_tma_aligned_size(17, 1) == 32
    with pytest.raises(ValueError, match="element_size must divide 16, got 3"):
        kernels.get_tma_aligned_size(5, 3)


@pytest.mark.parametrize("shape", [(5, 3), (1, 3), (4, 1), (2, 5, 3), (3, 1, 2)])
@pytest.mark.parametrize(
    "align", [kernels.get_mn_major_tma_aligned_tensor, kernels.get_col_major_tma_aligned_tensor]
)
def test_scales_are_brought_into_the_order_of_tma(shape, align):
    x = torch.randn(shape)
    aligned = align(x)
    assert torch.equal(aligned, x)
    assert aligned.stride() == kernels.empty_tma_aligned(shape, "cpu").stride()
    assert align(aligned) is aligned
    with pytest.raises(TypeError, match="sf must be float32, got float64"):
        align(x.double())
    with pytest.raises(ValueError, match="2 or 3 dimensions"):
        align(x.view(1, 1, *shape))


# ---- Without a GPU: configurations and their cubins ----


SHAPES = (
    *((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)),
    *((1, 1), (8, 128), (72, 200), (136, 144), (576, 7168), (1536, 1536), (129280, 7168)),
)
MS = (
    1,
    2,
    8,
    9,
    16,
    17,
    32,
    33,
    48,
    64,
    65,
    96,
    128,
    129,
    192,
    256,
    300,
    512,
    700,
    1024,
    4096,
    10**6,
)


def configs(num_sms: int = NUM_SMS) -> list[gemm_config.GemmConfig]:
    """All that are chosen over a broad grid of shapes."""
    found = {gemm_config.choose_config(m, n, k, num_sms): None for m in MS for n, k in SHAPES}
    return list(found)


@pytest.fixture(scope="module")
def cubins(tmp_path_factory) -> dict[gemm_config.GemmConfig, jit.Cubin]:
    """Compiled anew, so that their logs are those of today's compiler."""
    chosen = {c: None for num_sms in (132, 78, 8, 1) for c in configs(num_sms)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEFP8_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        compiled = jit.compile_kernels(
            jit.Kernel(room._SOURCE, c.kernel_name("kNone")) for c in chosen
        )
    return dict(zip(chosen, compiled, strict=True))


def test_every_configuration_compiles_and_spills_nothing(cubins):
    problems = {config: cubin.problems() for config, cubin in cubins.items()}
    assert {config: found for config, found in problems.items() if found} == {}


@given(m=sizes(5000, 1), n=sizes(40_000, 1), k=sizes(20_000, 1), num_sms=st.integers(1, 200))
def test_every_configuration_fits_an_sm(m, n, k, num_sms):
    config = gemm_config.choose_config(m, n, k, num_sms)
    assert config.stages >= 2
    assert config.shared_bytes <= 227 * 1024
    assert config.ctas_per_sm * (config.shared_bytes + 1024) <= 228 * 1024
    assert config.cluster <= 8
    assert config.cols % config.store_cols == 0
    assert config.split <= kernels.ceil_div(kernels.num_blocks(k), config.depth)
    assert config == gemm_config.choose_config(m, n, k, num_sms)


def test_a_bias_makes_nothing_spill(cubins, tmp_path, monkeypatch):
    """It comes on top when most registers are in use. One kind for each configuration."""
    monkeypatch.setenv("MOEFP8_CACHE_DIR", str(tmp_path))
    some = [
        jit.Kernel(room._SOURCE, config.kernel_name(KINDS[1 + i % 3]))
        for i, config in enumerate(cubins)
    ]
    problems = [cubin.problems() for cubin in jit.compile_kernels(some)]
    assert {k.name: found for k, found in zip(some, problems, strict=True) if found} == {}


def test_every_family_and_bias_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFP8_CACHE_DIR", str(tmp_path))
    families = enumerate(sanitizer_cases.FAMILIES.values())
    names = [config.kernel_name(KINDS[i % 4]) for i, config in families]
    jit.compile_kernels(jit.Kernel(room._SOURCE, name) for name in names)


def test_arguments_lie_in_memory_as_the_kernel_reads_them(tmp_path):
    names = [name for name, *_ in room._Arguments._fields_]
    in_order = ", ".join(f".{name} = {{}}" for name in names)  # C++ refuses any other order
    checks = [
        f"constexpr Arguments kInOrder = {{{in_order}}};",
        f"static_assert(sizeof(Arguments) == {ctypes.sizeof(room._Arguments)});",
        *(
            f"static_assert(sizeof(Arguments::{name}) == {getattr(room._Arguments, name).size});"
            for name in names
        ),
    ]
    for header in room._SOURCE.parent.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    source = tmp_path / "checked.cu"
    source.write_text("\n".join([room._SOURCE.read_text(), *checks]))
    jit.compile_kernel(jit.Kernel(source, configs()[0].kernel_name("kNone")))


def test_machine_code_is_what_was_meant(cubins, tmp_path):
    tool = cuda.pathfinder.find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    families = {(c.weights_are_rows, c.share > 1, c.split > 1, c.parts): c for c in cubins}
    for config in families.values():
        path = tmp_path / "kernel.cubin"
        path.write_bytes(cubins[config].image)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True)
        code = done.stdout
        assert re.search(r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3", code), config
        assert ("UTMALDG.2D.MULTICAST" in code) == (config.share > 1), config
        assert "UTMASTG.2D" in code, config
        assert not re.search(r"MEMBAR\S*\.(GPU|SYS)", code), config


# ---- On a GPU ----


def on_gpu(test):
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
    return pytest.mark.gpu(missing(test))


class Case(NamedTuple):
    """Operands on the GPU, and what they give in FP64."""

    arguments: tuple[torch.Tensor | None, ...]
    expected: torch.Tensor
    size: torch.Tensor  # of the terms: the sum of their magnitudes


def case(m: int, n: int, k: int, bias: torch.dtype | None = None, octaves: int = 0) -> Case:
    """octaves: over how many powers of two the scales spread; their products over twice as many."""
    a = quantize_1x128(torch.randn(m, k, device="cuda"))
    b = quantize_128x128(torch.randn(n, k, device="cuda"))
    for scale_inv in (a.scale_inv, b.scale_inv):
        exponents = (torch.rand(scale_inv.shape, device="cuda") - 0.5) * octaves
        scale_inv.mul_(torch.exp2(exponents))
    added = None if bias is None else torch.randn(n, device="cuda").to(bias)
    d = torch.full((m, n), NAN, dtype=torch.bfloat16, device="cuda")
    return Case((*a, *b, d, added), *in_fp64(a, b, added))


def in_fp64(a: BlockScaled, b: BlockScaled, bias: torch.Tensor | None) -> list[torch.Tensor]:
    """d and the sum of the magnitudes of its terms."""
    (n, k), block = b.data.shape, 128
    scales = (
        a.scale_inv.double().repeat_interleave(block, 1)[:, :k],
        b.scale_inv.double().repeat_interleave(block, 0)[:n].repeat_interleave(block, 1)[:, :k],
    )
    x, y = (q.data.double() * scale for q, scale in zip((a, b), scales, strict=True))
    added = torch.zeros(n, device=x.device) if bias is None else bias.double()
    return [x @ y.T + added, x.abs() @ y.T.abs() + added.abs()]


def assert_right(d: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """One rounding to BF16, and the tensor cores' sums: where terms cancel, by the terms' size."""
    error = (d.double() - expected).abs()
    excess = error - expected.abs() * 2**-8 - size * 2**-11
    assert bool((excess <= 0).all()), f"off by {float((error / size).max()):.2e} of the terms"
    if d.shape[1] >= 64:
        assert_matches_reference(d, expected)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launch_and_compare(made: Case) -> None:
    made.arguments[4].fill_(NAN)
    with no_synchronisation():
        room.launch_gemm(*made.arguments)
    assert_right(made.arguments[4], made.expected, made.size)


@on_gpu
@settings(max_examples=100)
@given(
    shape=gemm_shapes(max_m=300, max_n=700, max_k=1100),
    seed=st.integers(0, 2**16),
    octaves=st.sampled_from((0, 20)),
    places=st.tuples(*[st.sampled_from(("own", *sorted(PLACES)))] * 3),
    scale_places=st.tuples(*[st.sampled_from(("own", *sorted(SCALE_PLACES)))] * 2),
    bias=st.sampled_from(BIASES),
)
def test_any_shape_and_layout_is_right(shape, seed, octaves, places, scale_places, bias):
    torch.manual_seed(seed)
    made = case(*shape, bias, octaves)
    a, a_scale_inv, b, b_scale_inv, d, added = made.arguments
    a, b, d = (
        x if place == "own" else PLACES[place].make(x)
        for place, x in zip(places, (a, b, d), strict=True)
    )
    a_scale_inv, b_scale_inv = (
        x if place == "own" else SCALE_PLACES[place](x)
        for place, x in zip(scale_places, (a_scale_inv, b_scale_inv), strict=True)
    )
    around = d.as_strided((d.untyped_storage().nbytes() // 2,), (1,), 0)
    d.fill_(0)
    before = around.clone()
    d.fill_(NAN)
    with no_synchronisation():
        room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, added)
    assert_right(d, made.expected, made.size)
    d.fill_(0)
    assert torch.equal(around.view(torch.uint8), before.view(torch.uint8))


@on_gpu
@pytest.mark.parametrize("m", [1, 7, 16, 40, 64, 100, 128, 200, 512, 1000, 4096])
def test_large_shapes_are_right(m):
    for n, k in ((2112, 7168), (4096, 7168), (7168, 2048), (32768, 512), (1111, 9000)):
        launch_and_compare(case(m, n, k, BIASES[(m + n) % 4]))


@on_gpu
@pytest.mark.parametrize("name", sanitizer_cases.FAMILIES)
def test_every_family_is_right(name, monkeypatch):
    """Also where it would not be chosen."""
    config = sanitizer_cases.FAMILIES[name]
    monkeypatch.setattr(gemm_config, "choose_config", lambda *shape: config)
    monkeypatch.setattr(room, "_plans", {})
    monkeypatch.setattr(room, "_launches", {})
    k = 128 * config.split * config.depth
    shapes = [
        *sanitizer_cases.shapes_of(config),
        *((1, 1, k), (3, 129, k + 8), (257, 1000, k + 1000), (1500, 2112, 7168), (16, 8, 7168)),
    ]
    for i, (m, n, k) in enumerate(shapes):
        launch_and_compare(case(m, n, k, BIASES[i % 4], octaves=i % 3 * 10))


@on_gpu
@pytest.mark.parametrize("shape", [(5, 200, 520), (300, 576, 512), (1, 136, 128)])
def test_extreme_scales_are_right(shape):
    """Products of scales from 2**-100 to 2**100; neighbouring rows and blocks lie far apart."""
    launch_and_compare(case(*shape, octaves=100))


@on_gpu
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("m", [6, 200])
def test_bad_activations_stay_in_their_row(bad, m):
    x, b = torch.randn(m, 1000, device="cuda"), quantize_128x128(torch.randn(400, 1000).cuda())
    clean, d = (torch.empty(m, 400, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    fp8_gemm_nt(quantize_1x128(x), b, clean)
    x[2, 7] = bad
    fp8_gemm_nt(quantize_1x128(x), b, d)
    assert bool(d[2].isnan().all())
    others = torch.arange(m) != 2
    assert torch.equal(d[others], clean[others])


@on_gpu
def test_the_op_takes_our_kernel(monkeypatch):
    made = case(33, 200, 520, torch.bfloat16)
    a, a_scale_inv, b, b_scale_inv, d, bias = made.arguments
    monkeypatch.setattr(room, "_launches", {})
    for _ in range(2):
        fp8_gemm_nt((a, a_scale_inv), (b, b_scale_inv), d.fill_(NAN), bias=bias)
        assert_right(d, made.expected, made.size)
        assert len(room._launches) == 1


@on_gpu
@pytest.mark.parametrize("bias", BIASES)
def test_empty_sizes(bias):
    for m, n, k in ((0, 5, 9), (5, 0, 9), (5, 7, 0), (0, 0, 0)):
        made = case(m, n, k, bias)
        launch_and_compare(made)


SOME_SHAPES = (1, 2112, 7168), (64, 4096, 7168), (300, 1000, 2000), (4096, 2112, 7168)


@on_gpu
@pytest.mark.parametrize("shape", SOME_SHAPES)
def test_repeated_runs_are_identical(shape):
    made = case(*shape)
    launch_and_compare(made)
    first = made.arguments[4].clone()
    for _ in range(20):
        made.arguments[4].fill_(NAN)
        room.launch_gemm(*made.arguments)
        assert torch.equal(made.arguments[4], first)


@on_gpu
def test_streams_run_side_by_side():
    cases = [case(*shape) for shape in SOME_SHAPES]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(30):
        for made, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                made.arguments[4].fill_(NAN)
                room.launch_gemm(*made.arguments)
    torch.cuda.synchronize()
    for made in cases:
        assert_right(made.arguments[4], made.expected, made.size)


@on_gpu
def test_the_current_stream_is_taken():
    made, stream = case(300, 1000, 2000), torch.cuda.Stream()
    a, *others = made.arguments
    late = torch.zeros(a.shape, dtype=torch.uint8, device="cuda").view(a.dtype)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(a)
        room.launch_gemm(late, *others)
    stream.synchronize()
    assert_right(others[3], made.expected, made.size)


@on_gpu
def test_threads_share_what_is_prepared():
    cases = [case(m, 1000, 2000) for m in (5, 70, 300, 70)]
    torch.cuda.synchronize()

    def work(made: Case) -> None:
        for _ in range(50):
            room.launch_gemm(*made.arguments)
        torch.cuda.synchronize()

    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(work, cases))
    for made in cases:
        assert_right(made.arguments[4], made.expected, made.size)


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one():
    made = case(70, 1000, 2000)
    there = [x if x is None else x.to("cuda:1") for x in made.arguments]
    room.launch_gemm(*there)
    assert_right(there[4].to("cuda:0"), made.expected, made.size)


@on_gpu
@pytest.mark.parametrize("shape", [(1, 2112, 7168), (77, 333, 1000), (512, 2112, 7168)])
def test_graphs_replay_with_new_numbers(shape, monkeypatch):
    monkeypatch.setattr(room, "_plans", {})  # preparing while a graph is captured must be allowed
    monkeypatch.setattr(room, "_launches", {})
    made = case(*shape, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        room.launch_gemm(*made.arguments)
    for _ in range(3):
        new = case(*shape, torch.float32)
        for x, y in zip(made.arguments, new.arguments, strict=True):
            x.copy_(y)
        graph.replay()
        assert_right(made.arguments[4], new.expected, new.size)


@on_gpu
@pytest.mark.parametrize("m", [3, 300])
def test_a_limit_of_sms_changes_no_result(m):
    made = case(m, 2112, 7168)
    try:
        for limit in (1, 8, 131, 10_000, None):
            kernels.set_num_sms(limit)
            launch_and_compare(made)
    finally:
        kernels.set_num_sms(None)


@on_gpu
def test_more_than_2_to_31_elements():
    repeats, rows, few, k = 300, 1024, 16, 7168
    assert repeats * rows * k > 2**31
    many, other = torch.randn(rows, k, device="cuda"), torch.randn(128, k, device="cuda")
    a, b = quantize_1x128(many), quantize_128x128(other)
    data, scales = a.data.repeat(repeats, 1), a.scale_inv.repeat(repeats, 1)
    d = torch.full((repeats * rows, 128), NAN, dtype=torch.bfloat16, device="cuda")
    room.launch_gemm(data, scales, *b, d, None)
    blocks = d.view(repeats, rows, 128)
    assert_right(blocks[0], *in_fp64(a, b, None))
    assert bool((blocks == blocks[0]).all())

    b = quantize_128x128(many)
    scales = b.scale_inv.repeat(repeats, 1)
    a = quantize_1x128(other[:few])
    d = torch.full((few, repeats * rows), NAN, dtype=torch.bfloat16, device="cuda")
    data.view(repeats, rows, k).copy_(b.data)
    room.launch_gemm(*a, data, scales, d, None)
    blocks = d.view(few, repeats, rows)
    assert_right(blocks[:, 0], *in_fp64(a, b, None))
    assert bool((blocks == blocks[:, :1]).all())


@on_gpu
def test_d_of_more_than_2_to_31_elements():
    m, n, k = 2**15 + 7, 2**16 + 8, 64
    assert m * n > 2**31
    a, b = (
        quantize_1x128(torch.randn(m, k, device="cuda")),
        quantize_128x128(torch.randn(n, k, device="cuda")),
    )
    d = torch.full((m, n), NAN, dtype=torch.bfloat16, device="cuda")
    room.launch_gemm(*a, *b, d, None)
    for rows in (slice(0, 300), slice(m - 300, m)):
        some = BlockScaled(a.data[rows], a.scale_inv[rows])
        assert_right(d[rows], *in_fp64(some, b, None))


# ---- On a GPU: the linear layer ----


def in_two_steps(layer: FP8Linear, x: torch.Tensor) -> torch.Tensor:
    """The layer, with nothing in flight while its GEMM starts."""
    y = torch.empty(x.shape[0], layer.out_features, dtype=torch.bfloat16, device="cuda")
    quantized = quantize_1x128(x)
    torch.cuda.synchronize()
    fp8_gemm_nt(quantized, (layer.weight, layer.weight_scale_inv), y, bias=layer.bias)
    return y.to(x.dtype)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("m", [0, 1, 33, 500])
def test_linear_equals_its_two_steps(m, dtype):
    for n, k in ((2112, 7168), (200, 300), (333, 1024)):
        layer, x = FP8Linear(k, n, device="cuda"), torch.randn(m, k, device="cuda").to(dtype)
        with no_synchronisation():
            y = layer(x)
        assert torch.equal(y, in_two_steps(layer, x))


@on_gpu
@pytest.mark.parametrize("m", [1, 64, 700])
def test_a_chain_of_layers_waits_where_it_must(m):
    """Each kernel starts while the one before ends, and memory is reused at once."""
    layers = [FP8Linear(1536, 1536, device="cuda") for _ in range(6)]
    x = torch.randn(m, 1536, device="cuda").bfloat16()
    with torch.inference_mode():
        expected = x
        for layer in layers:
            expected = in_two_steps(layer, expected * 2)
        for _ in range(30):
            y = x
            for layer in layers:
                y = layer(y * 2)
            assert torch.equal(y, expected)


@on_gpu
def test_weights_written_just_before_are_seen():
    layer, x = FP8Linear(7168, 2112, device="cuda"), torch.randn(16, 7168, device="cuda")
    sources = [FP8Linear(7168, 2112, device="cuda") for _ in range(4)]
    expected = [in_two_steps(source, x) for source in sources]
    with torch.inference_mode():
        for _ in range(10):
            results = []
            for source in sources:
                for name in ("weight", "weight_scale_inv", "bias"):
                    getattr(layer, name).copy_(getattr(source, name))
                results.append(layer(x))
            for y, right in zip(results, expected, strict=True):
                assert torch.equal(y, right)


@on_gpu
@pytest.mark.parametrize("k", [512, 300])
def test_linear_in_a_graph(k):
    layer, x = FP8Linear(k, 333, device="cuda"), torch.randn(20, k, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        y = layer(layer.in_features**-0.5 * x)
    for _ in range(3):
        x.copy_(torch.randn(20, k))
        graph.replay()
        assert torch.equal(y, in_two_steps(layer, layer.in_features**-0.5 * x))


@on_gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_linear_compiles_whole(backend):
    if backend == "inductor" and not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("needs a C compiler")
    layer = FP8Linear(512, 336, device="cuda")
    compiled = torch.compile(lambda x: layer(x * 2) + 1, fullgraph=True, backend=backend)
    for m in (3, 40, 41):
        x = torch.randn(m, 512, device="cuda").bfloat16()
        with torch.no_grad():
            assert torch.equal(compiled(x), in_two_steps(layer, x * 2) + 1)
