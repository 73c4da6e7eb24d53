"""A stand-in for libcuda, so that launchers are tested without a GPU.

A launch computes on the CPU what the kernel would, out of the tensor maps and arguments that it was
given. A wrong address, stride or extent gives a wrong result.
"""

import ctypes
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from gemm_cases import KINDS
from gpu_cases import NUM_SMS

from moefp8 import kernels
from moefp8.kernels import (
    combine_launch,
    dispatch_launch,
    experts,
    experts_launch,
    feed_forward,
    gemm,
    gemm_choice,
    gemm_config,
    gemm_launch,
    gemm_plan,
    grouped_launch,
    jit,
    quantize,
    top_k,
    top_k_launch,
)
from moefp8.kernels import quantize_launch as quantize_room
from moefp8.kernels.gemm_config import Kind
from moefp8.kernels.inputs import INPUTS
from moefp8.kernels.jit import driver, launch, module, tma


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


class Segment(NamedTuple):
    """Tokens from `begin` to `end` of one group."""

    begin: int
    end: int
    group: int


class Emulator:
    """libcuda, as far as launches need it."""

    def __init__(self) -> None:
        self.maps: list[Map] = []
        self.kernels: list[jit.Kernel] = []
        self.launched: list[SimpleNamespace] = []
        self.chosen: list[tuple[int, ...]] = []
        self.config_of: dict[str, gemm_config.GemmConfig] = {}

    def load(self, kernel: jit.Kernel, device_index: int) -> jit.Function:
        self.kernels.append(kernel)
        return module.Function(kernel, device_index, 1, len(self.kernels), 232448)

    def cuTensorMapEncodeTiled(self, at, dtype, rank, address, shape, strides, box, *rest):
        assert rank in (2, 3)
        dtypes = {0: torch.float8_e4m3fn, 7: torch.float32, 9: torch.bfloat16}
        ones, interleave, swizzle, promotion, _ = rest
        assert (list(ones), interleave) == ([1] * rank, 0)
        dtype, swizzle = dtypes[dtype], 16 << swizzle if swizzle else 0
        assert strides[0] >= shape[0] * dtype.itemsize  # rows do not overlap
        pitches = [stride // dtype.itemsize for stride in strides[: rank - 1]]
        ctypes.c_size_t.from_address(at).value = len(self.maps)  # so that a copy can be told too
        self.maps.append(
            Map(dtype, address, list(shape), pitches, list(box), swizzle, 32 << promotion)
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
        bodies = {
            **{"quantize": self.quantize, "softmax": self.top_k, "sigmoid": self.top_k},
            **{"count": self.count, "dispatch": self.dispatch, "combine": self.combine},
        }
        bodies.get(kernel.name.split("_")[0], self.gemm)(made, parameters)
        return 0

    def quantize(self, made, parameters):
        made.arguments = x = copy_of(quantize_room._Arguments, parameters[0])
        dtype = next(d for d, name in INPUTS.items() if f"<{name}," in made.kernel.name)
        assert x.num_matrices == 1
        source = memory(x.x, dtype, [x.num_rows, x.k], [x.row_bytes // dtype.itemsize, 1])
        data, scale_inv = quantize._quantize_1x128(source, bool(x.ue8m0))
        memory(x.data, torch.float8_e4m3fn, [x.num_rows, x.k], [x.k, 1]).copy_(data)
        memory(x.scale_inv, torch.float32, list(scale_inv.shape), [1, x.pitch]).copy_(scale_inv)

    def top_k(self, made, parameters):
        made.arguments = x = copy_of(top_k_launch._Arguments, parameters[0])
        op, name, items = re.fullmatch(r"(\w+)_kernel<(.*), (\d+)>", made.kernel.name).groups()
        dtype = next(d for d, found in INPUTS.items() if found == name)
        shape = [x.num_tokens, x.num_experts]
        assert int(items) == kernels.ceil_div(x.num_experts, 32) <= 16
        assert made.grid * made.block // 32 >= x.num_tokens > (made.grid - 1) * made.block // 32
        assert made.block % 32 == 0
        assert 32 <= made.block <= 128
        assert x.group_lanes.bit_count() == 1
        assert x.group_lanes * x.num_groups <= 32 or x.group_lanes == 1
        strides = [x.row_bytes // dtype.itemsize, x.expert_bytes // dtype.itemsize]
        logits = memory(x.logits, dtype, shape, strides)
        if op == "softmax_topk":
            result = top_k._softmax_topk(logits, x.top_k, bool(x.renormalize))
        else:
            bias = memory(x.bias, torch.float32, shape[1:], [1]) if x.bias else None
            rest = x.top_k, x.num_groups, x.topk_groups, bool(x.renormalize), x.scaling_factor
            result = top_k._sigmoid_group_topk(logits, bias, *rest)
        for address, found in zip((x.top_k_index, x.top_k_weights), result, strict=True):
            memory(address, found.dtype, [*found.shape], [x.top_k, 1]).copy_(found)

    @staticmethod
    def places(routing):
        """Tokens or choices with a row, for each expert; expert and row of each choice, or -1.

        Of the rows of all experts, a choice has one of its own; of matrices, the token.
        """
        num_tokens, top_k = routing.num_tokens, routing.top_k
        id_dtype = torch.int64 if routing.is_wide else torch.int32
        id_strides = [y // id_dtype.itemsize for y in (routing.token_bytes, routing.choice_bytes)]
        ids = memory(routing.ids, id_dtype, [num_tokens, top_k], id_strides).tolist()
        of_experts = [{} for _ in range(routing.num_experts)]
        of_choices = [[-1] * top_k for _ in range(num_tokens)]
        for token, choice in itertools.product(range(num_tokens), range(top_k)):
            expert = ids[token][choice]
            if 0 <= expert < routing.num_experts:
                rows_of_expert = of_experts[expert]
                key = (token, 0) if routing.max_m else (token, choice)
                row = rows_of_expert.setdefault(key, len(rows_of_expert))
                of_choices[token][choice] = expert, row
        return of_experts, of_choices

    def counts_of(self, x):
        """[chunks, slots] of how many rows each expert has in each chunk of tokens."""
        counts = torch.zeros(x.num_chunks, x.routing.num_slots, dtype=torch.int16)
        for expert, rows in enumerate(self.places(x.routing)[0]):
            for token, _ in rows:
                counts[token // x.routing.chunk, expert] += 1
        return counts

    def count(self, made, parameters):
        made.arguments = x = copy_of(dispatch_launch._Arguments, parameters[0])
        counts = self.counts_of(x)
        assert (made.grid, made.block) == (x.num_chunks, 128)
        assert f"<{str(x.routing.max_m > 0).lower()}>" in made.kernel.name
        memory(x.counts, torch.int16, [*counts.shape], [counts.shape[1], 1]).copy_(counts)

    def dispatch(self, made, parameters):
        made.arguments = x = copy_of(dispatch_launch._Arguments, parameters[0])
        routing, h = x.routing, x.hidden_size
        num_tokens, top_k, e = routing.num_tokens, routing.top_k, routing.num_experts
        blocks = kernels.num_blocks(h)
        assert x.num_k_blocks == blocks
        assert made.grid == x.num_chunks * x.num_parts
        assert x.num_chunks == kernels.ceil_div(num_tokens, routing.chunk)
        name, *flags = re.search(r"<(.*)>", made.kernel.name)[1].split(", ")
        dtype = next(d for d, found in INPUTS.items() if found == name)
        _, merges, is_counted = (flag == "true" for flag in flags)
        assert merges == (routing.max_m > 0)
        if is_counted:
            shape = [x.num_chunks, routing.num_slots]
            counted = memory(x.counts, torch.int16, shape, [shape[1], 1])
            assert torch.equal(counted, self.counts_of(x))
            assert made.programmatic
        places = self.places(routing)
        counts = [len(rows) for rows in places[0]]
        if routing.max_m:
            assert max(counts) <= routing.max_m
            offsets = [routing.max_m * i for i in range(e + 1)]
        else:
            offsets = [0, *itertools.accumulate(counts)]
        source = memory(x.x, dtype, [num_tokens, h], [x.x_row_bytes // dtype.itemsize, 1])
        data, scale_inv = quantize._quantize_1x128(source, False)
        token_to_row = [[-1] * top_k for _ in range(num_tokens)]
        for token, choice in itertools.product(range(num_tokens), range(top_k)):
            if places[1][token][choice] == -1:
                continue
            expert, in_expert = places[1][token][choice]
            row = token_to_row[token][choice] = offsets[expert] + in_expert
            codes = data[token].view(torch.uint8)
            memory(x.rows + row * x.row_pitch, torch.uint8, [h], [1]).copy_(codes)
            first = row
            if routing.max_m:
                first = expert * blocks * x.scale_pitch + in_expert
            scales = memory(x.row_scales + first * 4, torch.float32, [blocks], [x.scale_pitch])
            scales.copy_(scale_inv[token])
        for address, values in (
            (routing.expert_offsets, offsets),
            (routing.tokens_per_expert, counts),
            (routing.token_to_row, list(itertools.chain.from_iterable(token_to_row))),
        ):
            memory(address, torch.int32, [len(values)], [1]).copy_(torch.tensor(values))

    def combine(self, made, parameters):
        made.arguments = x = copy_of(combine_launch._Arguments, parameters[0])
        name = re.search(r"Input::\w+", made.kernel.name)[0]
        dtype = next(d for d, found in INPUTS.items() if found == name)
        shape, h = [x.num_tokens, x.top_k], x.hidden_size
        strides = [y // dtype.itemsize for y in (x.weight_token_bytes, x.weight_choice_bytes)]
        weights = memory(x.weights, dtype, shape, strides).float()
        token_to_row = memory(x.token_to_row, torch.int32, shape, [x.top_k, 1]).tolist()
        out = memory(x.out, torch.bfloat16, [x.num_tokens, h], [h, 1])
        for token, rows in enumerate(token_to_row):
            total = torch.zeros(h)
            for choice, row in enumerate(rows):
                if row >= 0:
                    y = memory(x.y + row * x.y_row_bytes, torch.bfloat16, [h], [1])
                    total += weights[token, choice] * y.float()
            out[token] = total

    def gemm(self, made, parameters):
        made.config = config = self.config_of[made.kernel.name]
        num_boxes = 1
        if config.begins_anywhere:  # as many times 64 tokens as a group has left
            num_boxes = kernels.ceil_div(config.rows + config.tail, 64)
        made.a_maps, (made.scale_map,), made.b_maps, (made.d_map,) = (
            self.maps_at(parameters[0], num_boxes),
            self.maps_at(parameters[1]),
            self.maps_at(parameters[2], len(config.weight_pieces)),
            self.maps_at(parameters[3]),
        )
        made.arguments = arguments = copy_of(gemm_plan.Arguments, parameters[4])
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
        weight_scales = memory(
            arguments.weight_scales,
            torch.float32,
            [*groups, kernels.num_blocks(n), k_blocks],
            strides,
        )
        kind = re.search(r"Bias::(\w+)", made.kernel.name)[1]
        assert (kind == "kNone") == (arguments.bias is None)
        if config.grouped:
            self.grouped_gemm(made, weight_scales, strides)
            return
        self.check_tiles(made, m, n)
        tensors = made.a_maps[0].tensor(), made.scale_map.tensor().mT, made.b_maps[0].tensor()
        result = gemm.block_scaled_matmul(*tensors, weight_scales)
        if kind != "kNone":
            dtype = next(dtype for dtype, name in gemm_plan.BIASES.items() if name == kind)
            result += memory(arguments.bias, dtype, [n], [1]).float()
        made.d_map.tensor().copy_(result)

    def grouped_gemm(self, made, weight_scales, scale_strides):
        groups, kind = made.arguments.groups, kind_of(made)
        a, token_scales, b, d = (
            x.tensor() for x in (made.a_maps[0], made.scale_map, made.b_maps[0], made.d_map)
        )
        (num_matrices, m, _), num_groups = d.shape, b.shape[0]
        assert (groups.num_groups, groups.num_tokens) == (num_groups, m)
        assert num_matrices == (num_groups if kind == Kind.MASKED else 1)
        # Rows of tiles of which not all are the group's are stored without TMA.
        assert groups.d == d.data_ptr()
        assert groups.d_row_stride == d.stride(1) or m == 1
        assert groups.d_matrix_stride == d.stride(0) or num_matrices == 1
        segments = self.segments(groups, kind)
        self.check_group_tiles(made, segments)
        activation = made.arguments.activation
        if made.config.gate_up:
            up = made.b_maps[1].tensor()
            up_scales = memory(
                activation.up_scales, torch.float32, [*weight_scales.shape], scale_strides
            )
            blocks = kernels.num_blocks(d.shape[2])
            strides = [blocks * activation.pitch, activation.pitch, 1]
            d_scales = memory(activation.scales, torch.float32, [num_matrices, blocks, m], strides)
        for begin, end, group in segments:
            matrix, rows = group if kind == Kind.MASKED else 0, slice(begin, end)
            tokens = a[matrix, rows], token_scales[matrix, :, rows].T
            result = gemm.block_scaled_matmul(*tokens, b[group], weight_scales[group])
            if made.config.gate_up:
                others = gemm.block_scaled_matmul(*tokens, up[group], up_scales[group])
                activated = experts.swiglu(result, others, activation.limit)
                data, scale_inv = quantize._quantize_1x128(activated, False)
                d[matrix, rows].view(torch.uint8).copy_(data.view(torch.uint8))
                d_scales[matrix, :, rows] = scale_inv.T
            else:
                d[matrix, rows] = result

    @staticmethod
    def segments(groups, kind):
        """As `segment` in gemm_groups.cuh; those with a token."""
        num_tokens, num_groups = groups.num_tokens, groups.num_groups
        sizes = {Kind.OFFSETS: num_groups + 1, Kind.MASKED: num_groups, Kind.ROWS: num_tokens}
        if groups.bounds is None:  # of a single group
            bounds = [0, num_tokens]
            assert (kind, num_groups) == (Kind.OFFSETS, 1)
        else:
            bounds = memory(groups.bounds, torch.int32, [sizes[kind]], [1]).tolist()
        if kind == Kind.ROWS:
            found = []
            for begin in range(0, num_tokens, 128):
                rows = itertools.takewhile(bounds[begin].__eq__, bounds[begin : begin + 128])
                found.append(Segment(begin, begin + len(list(rows)), bounds[begin]))
        else:
            begins = bounds if kind == Kind.OFFSETS else [0] * num_groups
            ends = bounds[1:] if kind == Kind.OFFSETS else bounds
            found = [Segment(begins[i], ends[i], i) for i in range(num_groups)]
        assert groups.num_segments == len(found)
        assert min(x.begin for x in found) >= 0
        assert max(x.end for x in found) <= num_tokens
        return [x for x in found if x.begin < x.end and 0 <= x.group < num_groups]

    def check_tiles(self, made, m, n):
        """Every tile is walked once."""
        config, arguments = made.config, made.arguments
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

    def check_group_tiles(self, made, segments):
        """Every token of a group meets every weight, and each box holds its tile's tokens."""
        config, arguments = made.config, made.arguments
        counts = arguments.num_row_tiles, arguments.num_col_tiles
        weight_tiles = counts[0 if config.weights_are_rows else 1]
        in_cluster = config.cluster if config.shares_tokens or config.meets_peer else 1
        of_cluster = config.outputs * in_cluster if config.gate_up else config.tile[1]
        assert weight_tiles == kernels.ceil_div(arguments.num_weights, of_cluster)
        loaded = [x.box[1] * (config.share if config.shares_tokens else 1) for x in made.a_maps]
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
            all_of_them = range(weight_tiles * in_cluster), range(segment.begin, segment.end)
            assert sorted(set(met)) == list(itertools.product(*all_of_them))
        clusters, rest = divmod(made.grid, config.cluster)
        assert rest == 0
        limit = min(gemm_plan.max_sms() or NUM_SMS, NUM_SMS)
        sms = limit * 7 // 8 if config.cluster > 2 else limit  # larger ones do not fill a GPC
        at_once = sms * (config.ctas_per_sm if limit == NUM_SMS else 1) // config.cluster
        assert min(max(1, at_once), num_tiles // config.cluster) <= clusters <= max(1, at_once)
        assert clusters >= 1

    @staticmethod
    def walk_group(made, segment, weight_tiles):
        """(tile of weights, its first token, which are stored) of each CTA, as `Scheduler`."""
        config, arguments = made.config, made.arguments
        step, (begin, end, _) = config.cta_tile[0], segment
        start = begin if config.begins_anywhere else begin // 4 * 4
        tall = kernels.ceil_div(max(end - start - config.tail, 1), config.tile[0])
        for tile in range(tall * weight_tiles):
            first = tile // (2 * weight_tiles) * 2
            weight_tile, token_tile = divmod(tile - first * weight_tiles, min(2, tall - first))
            first_token = start + (first + token_tile) * config.tile[0]
            for rank in range(config.cluster):
                if config.shares_tokens or config.meets_peer:
                    own_tile, own_first = weight_tile * config.cluster + rank, first_token
                else:
                    own_tile, own_first = weight_tile, first_token + rank * step
                left = max(0, end - own_first)
                own_first = min(own_first, arguments.last_token)
                if config.begins_anywhere:
                    in_rows = min(left, config.rows)
                    own_first = min(own_first, max(begin, end - kernels.round_up(in_rows, 64)))
                is_last = first + token_tile == tall - 1
                most = step + config.tail * is_last
                rows = range(max(begin, own_first), min(end, own_first + most))
                yield own_tile, own_first, rows

    def check_boxes(self, made, m):
        """Boxes are what the kernel takes them for."""
        config, outer = made.config, [1] * made.config.grouped
        tokens, weights = config.cta_tile
        tokens += config.tail
        shared = config.shares_tokens
        of_tokens, of_weights = (config.share, 1) if shared else (1, config.share)
        assert [x.box for x in made.b_maps] == [
            [128, size // of_weights, *outer] for size in config.weight_pieces
        ]
        # Out of bounds, TMA is slow: of an operand that is not shared, only what there is.
        heights = [tokens]
        if len(made.a_maps) > 1:
            heights = [*range(64, tokens, 64), tokens]
        loaded = [x if shared else min(x, m) for x in heights]
        assert [x.box for x in made.a_maps] == [[128, x // of_tokens, *outer] for x in loaded]
        of_l2 = {made.a_maps[0].l2_bytes} if config.grouped else {128 if m <= 64 else 256}
        for x in (*made.a_maps, *made.b_maps):
            assert (x.swizzle, {x.l2_bytes}) == (128, of_l2)
        scales = tokens + 4 if config.grouped and not config.weights_are_rows else tokens
        assert (made.scale_map.box, made.scale_map.swizzle) == ([scales, config.depth, *outer], 0)
        stage_bytes = [config.depth * ((x + weights) * 128 + scales * 4) for x in loaded]
        assert list(made.arguments.stage_bytes)[: len(loaded)] == stage_bytes
        # Tiles of tokens overlap rather than leave bounds, as far as 16 bytes of scales allow.
        last = made.arguments.last_token
        assert scales > tokens or last % 4 == 0
        spare = 1 if scales > tokens else 4
        assert m <= last + tokens < m + spare if m > tokens else last == 0
        assert made.d_map.box == [*config.store_box, *outer]
        span = config.store_box[0] * made.d_map.dtype.itemsize
        assert made.d_map.swizzle == (span if span > 16 else 0)


def kind_of(made) -> Kind:
    return Kind(re.search(r"Kind::(\w+)", made.kernel.name)[1])


class AnyIndex:
    """Of the current device: tensors of the CPU have index None, and say -1."""

    def __eq__(self, other):
        return other in (None, -1)


def copy_of(structure, address):
    return structure.from_buffer_copy(structure.from_address(address))


@contextmanager
def emulated(
    config: gemm_config.GemmConfig | None = None,
    gate_up: gemm_config.GemmConfig | None = None,
) -> Iterator[Emulator]:
    """Launches work on tensors of the CPU.

    config, and of gate and up gate_up: instead of what is chosen.
    """
    made = Emulator()

    def remember(chosen):
        kinds = Kind if chosen.grouped else [None]
        names = [chosen.kernel_name(bias, kind) for bias in KINDS for kind in kinds]
        made.config_of.update(dict.fromkeys(names, chosen))
        return chosen

    def telling(choose, instead):
        def choose_and_tell(*arguments):
            *shape, num_sms, _ = arguments
            made.chosen.append((*shape, num_sms))
            return remember(instead or choose(*arguments))

        return choose_and_tell

    properties = SimpleNamespace(multi_processor_count=NUM_SMS)
    tma._encode.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "library", lambda: made)
        for folder in (gemm_plan, quantize_room, top_k_launch, dispatch_launch, combine_launch):
            patch.setattr(folder, "load", made.load)
        for folder in (gemm_plan, quantize_room, top_k_launch, experts_launch, feed_forward):
            patch.setattr(folder, "current_stream", lambda device_index: 7)
        for folder in (gemm_launch, grouped_launch):
            patch.setattr(folder, "_launches", gemm_plan.Launches())
        patch.setattr(gemm_plan, "_max_sms", None)
        for folder in (quantize_room, top_k_launch):
            patch.setattr(folder, "_of_thread", folder._OfThread())
        patch.setattr(feed_forward, "_launches", {})
        patch.setattr(experts_launch, "_layers", {})
        patch.setattr(experts_launch, "_prepared", {})
        for name, instead in (
            ("choose_config", config),
            ("choose_grouped_config", config),
        ):
            patch.setattr(gemm_choice, name, telling(getattr(gemm_choice, name), instead))
        choose_both = gemm_choice.choose_experts_configs

        def choose_both_and_tell(*arguments):
            chosen = choose_both(*arguments)
            return remember(gate_up or chosen[0]), remember(config or chosen[1])

        patch.setattr(gemm_choice, "choose_experts_configs", choose_both_and_tell)
        patch.setattr(torch.cuda, "current_device", AnyIndex)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        yield made
    tma._encode.cache_clear()
