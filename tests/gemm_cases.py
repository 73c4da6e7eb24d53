"""What the tests of the dense GEMM share: operands, shapes, and a stand-in for libcuda.

`Emulator` needs no GPU: a launch computes on the CPU what the kernel would, out of the tensor maps
and arguments that it was given. A wrong address, stride or extent gives a wrong result.
"""

import ctypes
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from gpu_cases import NUM_SMS

from moefp8 import kernels
from moefp8.kernels import gemm, gemm_config, jit, quantize, round_up
from moefp8.kernels import gemm_launch as room
from moefp8.kernels import quantize_launch as quantize_room
from moefp8.kernels.jit import driver, launch, module, tma
from moefp8.quant import quantize_1x128, quantize_128x128

NAN = float("nan")
KINDS = "kNone", "kFloat", "kBFloat16", "kHalf"
BIASES = None, torch.float32, torch.bfloat16, torch.float16
# Of weights, [N, K], and numbers of tokens, over which configurations are chosen.
SHAPES = (
    *((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)),
    *((1, 1), (8, 128), (72, 200), (136, 144), (576, 7168), (1536, 1536), (129280, 7168)),
)
MS = (
    *(1, 2, 8, 9, 16, 17, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 300, 512, 700, 1024, 4096),
    10**6,
)


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


def operands(m: int, n: int, k: int, bias: torch.dtype | None = None) -> list[torch.Tensor | None]:
    """a, a_scale_inv, b, b_scale_inv, d filled with NaN, bias."""
    a, b = quantize_1x128(torch.randn(m, k)), quantize_128x128(torch.randn(n, k))
    d = torch.full((m, n), NAN, dtype=torch.bfloat16)
    return [*a, *b, d, None if bias is None else torch.randn(n).to(bias)]


def expected_of(a, a_scale_inv, b, b_scale_inv, d, bias) -> torch.Tensor:
    expected = torch.empty_like(d, memory_format=torch.contiguous_format)
    gemm._body(a, a_scale_inv, b, b_scale_inv, expected, bias)
    return expected


@contextmanager
def nothing_around_is_written(d: torch.Tensor) -> Iterator[None]:
    """Of the memory that d is a part of; d itself starts as NaN."""
    around = d.as_strided((d.untyped_storage().nbytes() // 2,), (1,), 0)
    d.fill_(0)
    before = around.clone()
    d.fill_(NAN)
    yield
    d.fill_(0)
    assert torch.equal(around.view(torch.uint8), before.view(torch.uint8))


# ---- A stand-in for libcuda ----


class Map(NamedTuple):
    dtype: torch.dtype
    address: int
    shape: list[int]
    stride: int
    box: list[int]
    swizzle: int
    l2_bytes: int


def memory(address: int, dtype: torch.dtype, shape: list[int], strides: list[int]) -> torch.Tensor:
    """What lies at an address of this process."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


class Emulator:
    """libcuda, as far as launches need it."""

    def __init__(self) -> None:
        self.maps: list[Map] = []
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
        ones, interleave, swizzle, promotion, _ = rest
        assert (list(ones), interleave) == ([1, 1], 0)
        dtype, swizzle = dtypes[dtype], 16 << swizzle if swizzle else 0
        assert strides[0] >= shape[0] * dtype.itemsize  # rows do not overlap
        pitch = strides[0] // dtype.itemsize
        ctypes.c_size_t.from_address(at).value = len(self.maps)  # so that a copy can be told too
        self.maps.append(
            Map(dtype, address, list(shape), pitch, list(box), swizzle, 32 << promotion)
        )
        return 0

    def maps_at(self, address, count=1):
        return [
            self.maps[ctypes.c_size_t.from_address(address + i * 128).value] for i in range(count)
        ]

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
        data, scale_inv = quantize._quantize_1x128(source, bool(x.ue8m0))
        memory(x.data, torch.float8_e4m3fn, [x.num_rows, x.k], [x.k, 1]).copy_(data)
        memory(x.scale_inv, torch.float32, list(scale_inv.shape), [1, x.pitch]).copy_(scale_inv)

    def gemm(self, made, parameters):
        config = self.config_of[made.kernel.name]
        (made.a_map,), (made.scale_map,), made.b_maps, (made.d_map,) = (
            self.maps_at(parameters[0]),
            self.maps_at(parameters[1]),
            self.maps_at(parameters[2], len(config.weight_pieces)),
            self.maps_at(parameters[3]),
        )
        made.arguments = arguments = copy_of(room._Arguments, parameters[4])
        a, b = made.a_map, made.b_maps[0]
        assert all(x._replace(box=b.box) == b for x in made.b_maps)
        (k, m), (_, n) = a.shape, b.shape
        assert made.d_map.shape == [n, m]
        assert made.scale_map.shape == [m, kernels.num_blocks(k)]
        assert (arguments.num_weights, arguments.num_k_blocks) == (n, kernels.num_blocks(k))
        assert bool(arguments.programmatic) == made.programmatic
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
        assert 1 <= arguments.band <= counts[0]
        walked = sorted(self.walk(arguments, clusters))
        assert walked == sorted(itertools.product(*map(range, counts)))
        self.check_boxes(made, config, m)

    @staticmethod
    def walk(arguments, clusters):
        """(row, column) of the tiles in the order of `Walk` in gemm_tile.cuh."""
        num_rows, num_cols = arguments.num_row_tiles, arguments.num_col_tiles
        for cluster in range(clusters):
            for tile in range(cluster, num_rows * num_cols, clusters):
                band, in_band = divmod(tile, arguments.band * num_cols)
                first = band * arguments.band
                height = min(arguments.band, num_rows - first)
                col = in_band // height
                if height == arguments.band:
                    assert in_band * arguments.inverse >> 33 == col
                yield first + in_band - col * height, col

    def check_boxes(self, made, config, m):
        tokens, weights = config.cta_tile
        shares_tokens = config.share_rows != config.weights_are_rows
        of_tokens, of_weights = (config.share, 1) if shares_tokens else (1, config.share)
        assert [x.box for x in made.b_maps] == [
            [128, size // of_weights] for size in config.weight_pieces
        ]
        # Out of bounds, TMA is slow: of an operand that is not shared, only what there is.
        loaded = tokens if of_tokens > 1 else min(tokens, m)
        assert made.a_map.box == [128, loaded // of_tokens]
        for x in (made.a_map, *made.b_maps):
            assert (x.swizzle, x.l2_bytes) == (128, 128 if m <= 64 else 256)
        assert (made.scale_map.box, made.scale_map.swizzle) == ([tokens, config.depth], 0)
        stage_bytes = config.depth * ((loaded + weights) * 128 + tokens * 4)
        assert made.arguments.stage_bytes == stage_bytes
        # Tiles of tokens overlap rather than leave bounds, as far as 16 bytes of scales allow.
        last = made.arguments.last_token
        assert last % 4 == 0
        assert m <= last + tokens < m + 4 if m > tokens else last == 0
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
            patch.setattr(folder, "current_stream", lambda device_index: 7)
        patch.setattr(room, "_launches", {})
        patch.setattr(room, "_plans", {})
        patch.setattr(room, "_max_sms", None)
        patch.setattr(quantize_room, "_of_thread", quantize_room._OfThread())
        patch.setattr(gemm_config, "choose_config", choose_and_tell)
        patch.setattr(torch.cuda, "current_device", lambda: -1)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        yield made
    tma._encode.cache_clear()
