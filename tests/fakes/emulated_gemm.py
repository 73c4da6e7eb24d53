"""What `gemm.cu` does with its tensor maps and arguments, on the CPU, and whether they are right.

A part of the stand-in for libcuda: see `emulator.py`.
"""

import ctypes
import itertools
import json
import math
import re
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from moefp8 import kernels
from moefp8.functional import experts
from moefp8.kernels import jit
from moefp8.kernels.common.activation import KINDS, Activation
from moefp8.kernels.common.checks import INPUTS
from moefp8.kernels.gemm.dense import block_scaled_matmul
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.sm90.config import GemmConfig
from moefp8.kernels.gemm.sm90.launch import BIASES
from moefp8.quant import numerics
from tests.gpu import NUM_SMS


class Map(NamedTuple):
    dtype: torch.dtype
    address: int
    shape: list[int]  # innermost first, as all here
    strides: list[int]  # in elements
    box: list[int]
    swizzle: int
    l2_bytes: int

    def tensor(self) -> torch.Tensor:
        """[rows, columns], or [matrices, rows, columns]."""
        strides = [*reversed(self.strides), 1]
        return memory(self.address, self.dtype, self.shape[::-1], strides)


def memory(address: int, dtype: torch.dtype, shape: list[int], strides: list[int]) -> torch.Tensor:
    """What lies at an address of this process."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


def dtype_of(kernel: jit.Kernel) -> torch.dtype:
    """The dtype of a kernel's input, as its template arguments state it."""
    (name,) = re.findall(r"Input::\w+", kernel.name)
    return next(dtype for dtype, found in INPUTS.items() if found == name)


def activation_of(kernel: jit.Kernel, arguments: Any) -> Activation:
    """The activation that a kernel's name and arguments state."""
    (name,) = re.findall(r"Activation::(\w+)", kernel.name)
    kind = next(kind for kind, found in KINDS.items() if found == name)
    limit, alpha = arguments.limit, arguments.alpha
    alpha = alpha if kind == "gpt_oss" else None
    return Activation(kind, None if math.isinf(limit) else limit, alpha)


def bias_dtype(kernel: jit.Kernel) -> torch.dtype | None:
    """The dtype of a GEMM's bias, as its template arguments state it; None: it has none."""
    found = re.search(r"Bias::(\w+)", kernel.name)[1]
    return next(dtype for dtype, name in BIASES.items() if name == found)


def config_of(kernel: jit.Kernel) -> GemmConfig:
    """The configuration that a kernel's template arguments state."""
    told = dict(re.findall(r"\.(\w+) = (\w+)", kernel.name))
    return GemmConfig(**{x.name: json.loads(told[x.name]) for x in fields(GemmConfig)})


class Segment(NamedTuple):
    """Tokens from `begin` to `end` of one group."""

    begin: int
    end: int
    group: int


class GemmEmulator:
    """It runs GEMMs, dense and grouped, and those of gate and up."""

    def __init__(self) -> None:
        self.maps: list[Map] = []

    def maps_at(self, address, count=1):
        """Maps behind each other, with the addresses that they were given last."""
        words = (ctypes.c_uint64 * (16 * count)).from_address(address)
        return [
            self.maps[words[i + 1]]._replace(address=words[i]) for i in range(0, 16 * count, 16)
        ]

    def gemm(self, made, parameters):
        made.config = config = config_of(made.kernel)
        arguments = made.arguments
        num_boxes = 1
        if config.begins_anywhere:  # as many times 64 tokens as a group has left
            num_boxes = kernels.ceil_div(config.wgmma_m + config.tail, 64)
        elif config.halves_tiles:
            num_boxes = 2
        counts = num_boxes, 1, len(config.weight_pieces), 1
        maps = map(self.maps_at, parameters, counts)
        made.a_maps, (made.scale_map,), made.b_maps, (made.d_map,) = maps
        for maps in (made.a_maps, made.b_maps):
            known = {"box": maps[0].box}
            if config.gate_up:  # the maps of the weights are gate's and up's
                known["address"] = maps[0].address
            assert all(x._replace(**known) == maps[0] for x in maps)
        assert made.d_map.dtype == (torch.float8_e4m3fn if config.gate_up else torch.bfloat16)
        (k, m, *matrices), (_, n, *groups) = made.a_maps[0].shape, made.b_maps[0].shape
        k_blocks = kernels.num_blocks(k)
        assert made.b_maps[0].shape[0] == k
        assert made.d_map.shape == [n, m, *matrices]
        assert made.scale_map.shape == [m, k_blocks, *matrices]
        assert len(groups) == len(matrices) == config.grouped
        assert (arguments.num_weights, arguments.num_k_blocks) == (n, k_blocks)
        assert bool(arguments.programmatic) == made.programmatic
        shared = (made.block, made.cluster, made.shared_bytes)
        assert shared == (config.threads, config.cluster, config.shared_bytes)
        self.check_boxes(made, m)
        strides = arguments.weight_scale_stride, arguments.weight_scale_stride_k
        if config.grouped:
            strides = arguments.groups.weight_scale_stride, *strides
        shape = [*groups, kernels.num_blocks(n), k_blocks]
        weight_scales = memory(arguments.weight_scales, torch.float32, shape, strides)
        bias = bias_dtype(made.kernel)
        assert (bias is None) == (arguments.bias is None)
        if config.grouped:
            self.grouped_gemm(made, weight_scales, strides)
            return
        self.check_tiles(made, m, n)
        tensors = made.a_maps[0].tensor(), made.scale_map.tensor().mT, made.b_maps[0].tensor()
        result = block_scaled_matmul(*tensors, weight_scales)
        if bias is not None:
            result += memory(arguments.bias, bias, [n], [1]).float()
        made.d_map.tensor().copy_(result)

    def grouped_gemm(self, made, weight_scales, scale_strides):
        groups, layout = made.arguments.groups, layout_of(made)
        a, token_scales, b, d = (
            x.tensor() for x in (made.a_maps[0], made.scale_map, made.b_maps[0], made.d_map)
        )
        (num_matrices, m, _), num_groups = d.shape, b.shape[0]
        assert (groups.num_groups, groups.num_tokens) == (num_groups, m)
        assert num_matrices == (num_groups if layout == GroupLayout.MASKED else 1)
        # Rows of tiles of which not all are the group's are stored without TMA.
        assert groups.d == d.data_ptr()
        assert groups.d_row_stride == d.stride(1) or m == 1
        assert groups.d_matrix_stride == d.stride(0) or num_matrices == 1
        segments = self.segments(groups, layout)
        self.check_group_tiles(made, segments)
        if groups.tile_counter is not None:
            tile_counter = memory(groups.tile_counter, torch.int32, [1], [1])
            assert tile_counter == 0
            tile_counter += 1 + made.grid
        gate_up = made.arguments.gate_up
        if made.config.gate_up:
            activation = activation_of(made.kernel, gate_up.activation)
            up = made.b_maps[1].tensor()
            up_scales = memory(
                gate_up.up_scales, torch.float32, [*weight_scales.shape], scale_strides
            )
            blocks = kernels.num_blocks(d.shape[2])
            strides = [blocks * gate_up.pitch, gate_up.pitch, 1]
            d_scales = memory(gate_up.scales, torch.float32, [num_matrices, blocks, m], strides)
            saved = self.saved_rows(made, d)
        for begin, end, group in segments:
            matrix, rows = group if layout == GroupLayout.MASKED else 0, slice(begin, end)
            tokens = a[matrix, rows], token_scales[matrix, :, rows].T
            result = block_scaled_matmul(*tokens, b[group], weight_scales[group])
            result += self.bias_of(made, group)
            if made.config.gate_up:
                others = block_scaled_matmul(*tokens, up[group], up_scales[group])
                others += self.bias_of(made, group, is_up=True)
                if saved is not None:
                    saved[rows, 0], saved[rows, 1] = result, others
                activated = experts.activate(result, others, activation)
                data, scale_inv = numerics.quantize_1x128(activated, False)
                d[matrix, rows].view(torch.uint8).copy_(data.view(torch.uint8))
                d_scales[matrix, :, rows] = scale_inv.T
            else:
                d[matrix, rows] = result

    @staticmethod
    def bias_of(made, group, is_up=False):
        """The bias of a group, as `bias_of_group` in store.cuh finds it."""
        first, n = made.arguments.bias, made.arguments.num_weights
        if (dtype := bias_dtype(made.kernel)) is None:
            assert first is None
            return 0
        row = 2 * group + is_up if made.config.gate_up else group
        return memory(first + row * n * dtype.itemsize, dtype, [n], [1]).float()

    @staticmethod
    def saved_rows(made, d):
        """bf16 [tokens, 2, outputs]: where gate and up are left for a backward, if they are."""
        gate_up, (num_matrices, m, n) = made.arguments.gate_up, d.shape
        assert (gate_up.saved is not None) == made.config.saves_gate_up
        if gate_up.saved is None:
            return None
        assert num_matrices == 1
        assert gate_up.saved_row_bytes == kernels.round_up(n, 8) * 2
        assert gate_up.saved % 16 == 0
        pitch = gate_up.saved_row_bytes // 2
        return memory(gate_up.saved, torch.bfloat16, [m, 2, n], [2 * pitch, pitch, 1])

    @staticmethod
    def segments(groups, layout):
        """What `segment` in schedule.cuh finds, if it has a token."""
        num_tokens, num_groups = groups.num_tokens, groups.num_groups
        sizes = {
            GroupLayout.OFFSETS: num_groups + 1,
            GroupLayout.MASKED: num_groups,
            GroupLayout.ROWS: num_tokens,
            GroupLayout.SEGMENTS: 4 + 4 * groups.num_segments,
        }
        if groups.bounds is None:  # there is a single group
            bounds = [0, num_tokens]
            assert (layout, num_groups) == (GroupLayout.OFFSETS, 1)
        else:
            bounds = memory(groups.bounds, torch.int32, [sizes[layout]], [1]).tolist()
        if layout == GroupLayout.ROWS:
            found = rows_of_blocks(bounds)
        elif layout == GroupLayout.SEGMENTS:
            entries = [Segment(*bounds[i : i + 3]) for i in range(4, len(bounds), 4)]
            found, behind = entries[: bounds[0]], entries[bounds[0] :]
            assert all(begin < end for begin, end, _ in found)
            assert all(x == (0, 0, 0) for x in behind)
            assert len(entries) == kernels.num_blocks(num_tokens)
            found = entries
        else:
            begins = bounds if layout == GroupLayout.OFFSETS else [0] * num_groups
            ends = bounds[1:] if layout == GroupLayout.OFFSETS else bounds
            found = [Segment(begins[i], ends[i], i) for i in range(num_groups)]
        assert groups.num_segments == len(found)
        assert min(x.begin for x in found) >= 0
        assert max(x.end for x in found) <= num_tokens
        return [x for x in found if x.begin < x.end and 0 <= x.group < num_groups]

    @staticmethod
    def find_segments(made, parameters):
        """What `segments.cu` writes."""
        x = made.arguments
        bounds = memory(x.group_of_row, torch.int32, [x.num_rows], [1]).tolist()
        written = list_of_segments(bounds, x.num_groups)
        assert (made.grid, x.list % 16) == (1, 0)
        memory(x.list, torch.int32, [len(written)], [1]).copy_(torch.tensor(written))

    @staticmethod
    def zero_tile_counter(made, parameters):
        assert made.grid == 1
        memory(made.arguments.counter, torch.int32, [1], [1]).zero_()

    def check_tiles(self, made, m, n):
        """Every tile is walked once, whole or in halves; a half is the last one of its CTA."""
        config, arguments = made.config, made.arguments
        sizes = (n, m) if config.swap_ab else (m, n)
        tile = reversed(config.tile) if config.swap_ab else config.tile
        counts = arguments.num_row_tiles, arguments.num_col_tiles
        assert counts == tuple(-(-size // side) for size, side in zip(sizes, tile, strict=True))
        clusters, rest = divmod(made.grid, config.cluster)
        assert rest == 0
        num_tiles = counts[0] * counts[1]
        assert clusters == num_tiles if config.split_k > 1 else 1 <= clusters <= num_tiles
        assert 1 <= arguments.band <= counts[0]
        whole = arguments.num_whole_tiles
        assert config.halves_tiles or whole == num_tiles
        assert whole == num_tiles or whole % clusters == 0
        assert 2 * (num_tiles - whole) <= clusters
        walked = sorted(self.walk(arguments, clusters))
        assert walked == sorted(itertools.product(*map(range, counts), (0, 1)))

    @staticmethod
    def walk(arguments, clusters):
        """(row, column, half) of the tiles in the order of `StaticScheduler` in schedule.cuh."""
        num_rows, num_cols = arguments.num_row_tiles, arguments.num_col_tiles
        whole = arguments.num_whole_tiles
        for cluster in range(clusters):
            for unit in range(cluster, 2 * num_rows * num_cols - whole, clusters):
                halves, tile = (0, 1), unit
                if unit >= whole:
                    beyond, half = divmod(unit - whole, 2)
                    halves, tile = (half,), whole + beyond
                band, in_band = divmod(tile, arguments.band * num_cols)
                first = band * arguments.band
                height = min(arguments.band, num_rows - first)
                col = in_band // height
                if height == arguments.band:
                    assert in_band * arguments.inverse >> 33 == col
                yield from ((first + in_band - col * height, col, half) for half in halves)

    def check_group_tiles(self, made, segments):
        """Every token of a group meets every weight, and each box holds its tile's tokens."""
        config, arguments = made.config, made.arguments
        weight_tiles = arguments.num_row_tiles if config.swap_ab else arguments.num_col_tiles
        of_cluster = config.outputs * config.cluster
        assert weight_tiles == kernels.ceil_div(arguments.num_weights, of_cluster)
        loaded = [x.box[1] * config.multicast for x in made.a_maps]
        num_tiles = 0
        for segment in segments:
            met = []
            for weight_tile, first, rows in self.walk_group(made, segment, weight_tiles):
                num_tiles += 1
                assert 0 <= first <= arguments.last_token
                assert config.begins_anywhere or first % 4 == 0
                if rows:
                    end = rows.stop - first
                    assert first <= rows.start
                    assert end <= loaded[0 if len(loaded) == 1 else (end - 1) // 64]
                met += [(weight_tile, row) for row in rows]
            all_of_them = range(weight_tiles * config.cluster), range(segment.begin, segment.end)
            assert sorted(set(met)) == list(itertools.product(*all_of_them))
        clusters, rest = divmod(made.grid, config.cluster)
        assert rest == 0
        num_sms = min(jit.current_driver().max_sms or NUM_SMS, NUM_SMS)
        at_once = num_sms * (config.ctas_per_sm if num_sms == NUM_SMS else 1) // config.cluster
        assert min(max(1, at_once), num_tiles // config.cluster) <= clusters <= max(1, at_once)
        assert clusters >= 1

    @staticmethod
    def walk_group(made, segment, weight_tiles):
        """(tile of weights, first token, which are stored) of each CTA, as `GroupedScheduler`."""
        config, arguments = made.config, made.arguments
        step, (begin, end, _) = config.tile_tokens, segment
        start = begin if config.begins_anywhere else begin // 4 * 4
        tall = kernels.ceil_div(max(end - start - config.tail, 1), step)
        assert arguments.band >= 1
        for tile in range(tall * weight_tiles):
            first = tile // (arguments.band * weight_tiles) * arguments.band
            height = min(arguments.band, tall - first)
            weight_tile, token_tile = divmod(tile - first * weight_tiles, height)
            first_token = start + (first + token_tile) * step
            in_rows = kernels.round_up(min(max(0, end - first_token), step), 64)
            first_token = min(first_token, arguments.last_token)
            if config.begins_anywhere:
                first_token = min(first_token, max(begin, end - in_rows))
            most = step + config.tail * (first + token_tile == tall - 1)
            rows = range(max(begin, first_token), min(end, first_token + most))
            for rank in range(config.cluster):
                yield weight_tile * config.cluster + rank, first_token, rows

    def check_boxes(self, made, m):
        """Boxes are what the kernel takes them for."""
        config, outer = made.config, [1] * made.config.grouped
        tokens, weights = config.most_tokens, config.tile_weights
        assert [x.box for x in made.b_maps] == [[128, x, *outer] for x in config.weight_pieces]
        # Out of bounds, TMA is slow: an operand that is not shared is loaded no further.
        heights = [*range(64, tokens, 64), tokens] if len(made.a_maps) > 1 else [tokens]
        loaded = [x if config.multicast > 1 else min(x, m) for x in heights]
        assert [x.box for x in made.a_maps] == [
            [128, x // config.multicast, *outer] for x in loaded
        ]
        of_l2 = {made.a_maps[0].l2_bytes} if config.grouped else {128 if m <= 64 else 256}
        for x in (*made.a_maps, *made.b_maps):
            assert (x.swizzle, {x.l2_bytes}) == (128, of_l2)
        scales = tokens + 4 if config.grouped and not config.swap_ab else tokens
        assert made.scale_map.box == [scales, config.k_blocks_per_stage, *outer]
        assert made.scale_map.swizzle == 0
        k_block_bytes = [(x + weights) * 128 + scales * 4 for x in loaded]
        stage_bytes = [config.k_blocks_per_stage * x for x in k_block_bytes]
        assert list(made.arguments.stage_bytes)[: len(loaded)] == stage_bytes
        # Tiles of tokens overlap rather than leave bounds, as far as 16 bytes of scales allow.
        last = made.arguments.last_token
        assert scales > tokens or last % 4 == 0
        spare = 1 if scales > tokens else 4
        assert m <= last + tokens < m + spare if m > tokens else last == 0
        assert made.d_map.box == [*config.store_box, *outer]
        span = config.store_box[0] * made.d_map.dtype.itemsize
        assert made.d_map.swizzle == (span if span > 16 else 0)


def rows_of_blocks(group_of_row: list[int]) -> list[Segment]:
    """The first rows of each block of 128, which are of one group, also where that is none."""
    found = []
    for begin in range(0, len(group_of_row), 128):
        of_block = group_of_row[begin : begin + 128]
        rows = itertools.takewhile(of_block[0].__eq__, of_block)
        found.append(Segment(begin, begin + len(list(rows)), of_block[0]))
    return found


def list_of_segments(group_of_row: list[int], num_groups: int) -> list[int]:
    """How many segments there are, three zeros; each of them with a zero; zeros to the end."""
    blocks, found = rows_of_blocks(group_of_row), []
    for begin, end, group in blocks:
        if not 0 <= group < num_groups:
            continue
        before = found[-1] if found else Segment(0, 0, -1)
        if before.group == group and before.end == begin:
            found[-1] = before._replace(end=end)
        else:
            found.append(Segment(begin, end, group))
    numbers = [len(found), 0, 0, 0]
    for segment in found:
        numbers += [*segment, 0]
    return numbers + [0] * 4 * (len(blocks) - len(found))


def layout_of(made) -> GroupLayout:
    return GroupLayout(re.search(r"GroupLayout::(\w+)", made.kernel.name)[1])
