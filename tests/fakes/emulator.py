"""A stand-in for a Hopper GPU, so that launchers are tested without one.

A launch computes on the CPU what the kernel would, out of the tensor maps and arguments that it was
given. A wrong address, stride or extent gives a wrong result.
"""

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from moefp8 import kernels
from moefp8.functional import swiglu_backward_launch, swiglu_launch
from moefp8.kernels import jit
from moefp8.kernels.common.checks import INPUTS
from moefp8.kernels.gemm import launch as gemm_launch
from moefp8.kernels.gemm import segments, tile_counter
from moefp8.kernels.gemm.config import GemmConfig
from moefp8.kernels.jit import launch
from moefp8.quant import numerics, quantize_launch, transpose_launch
from moefp8.routing import combine_launch, dispatch_launch, logits_launch, top_k_launch
from tests import naive
from tests.fakes.emulated_gemm import GemmEmulator, Map, memory
from tests.fakes.emulated_swiglu import swiglu_backward, swiglu_of_rows
from tests.gpu import NUM_SMS
from tests.kernels.gemm.cases import choosing
from tests.routing.cases import plan_of

_GUARD = 1 << 12
ARGUMENTS = {  # source of a kernel -> its last argument
    "gemm": gemm_launch.Arguments,
    "segments": segments.Arguments,
    "tile_counter": tile_counter.Arguments,
    "quantize": quantize_launch._Arguments,
    "transpose": transpose_launch._Arguments,
    "swiglu": swiglu_launch._Arguments,
    "swiglu_backward": swiglu_backward_launch._Arguments,
    "dispatch": dispatch_launch._Arguments,
    "combine": combine_launch._Arguments,
    "logits": logits_launch._Arguments,
    "top_k": top_k_launch._Arguments,
}


def dtype_of(kernel: jit.Kernel) -> torch.dtype:
    """The dtype of a kernel's input, as its template arguments state it."""
    (name,) = re.findall(r"Input::\w+", kernel.name)
    return next(dtype for dtype, found in INPUTS.items() if found == name)


class FakeDriver(jit.Driver):
    """The driver of a Hopper GPU that works on tensors of the CPU: `jit.using(FakeDriver())`.

    num_sms: how many SMs it has. max_prepared: as in `jit.Driver`.
    library: runs what is launched.
    launched: all launches so far, with what the kernel was given; `gemms` are those of GEMMs.
    """

    def __init__(
        self,
        num_sms: int = NUM_SMS,
        max_prepared: int = 4096,
        library: "Emulator | None" = None,
    ) -> None:
        super().__init__(library or Emulator(), max_prepared)
        self.sms, self.stream = num_sms, 7
        self.launched, self.kernels = self.library.launched, self.library.kernels
        self.maps = self.library.maps
        self.workspaces: list[torch.Tensor] = []
        self._guarded: dict[int, torch.Tensor] = {}

    @property
    def gemms(self) -> list[SimpleNamespace]:
        return [made for made in self.launched if made.kernel.source == gemm_launch.SOURCE]

    def load(self, kernel: jit.Kernel, device_index: int) -> jit.Function:
        self.kernels.append(kernel)
        return jit.Function(kernel, device_index, ctypes.c_void_p(len(self.kernels)), 232448)

    def num_sms(self, device_index: int) -> int:
        return self.sms

    def current_stream(self, device_index: int) -> int:
        return self.stream

    def current_device(self) -> int:
        return -1

    def is_capturing(self) -> bool:
        return False

    def is_lost(self, function: jit.Function) -> bool:
        return False

    def on_device(self, device_index: int):
        return nullcontext()

    def runs_our_kernels(self, device_index: int) -> bool:
        return True

    def allocate(self, num_bytes: int, stream: int) -> int:
        """Return the same memory for each size; it holds NaN, and nothing is written around it."""
        found = self._guarded.get(num_bytes)
        if found is None:
            found = torch.empty(num_bytes + 2 * _GUARD + 256, dtype=torch.uint8)
            self._guarded[num_bytes] = found
        found.fill_(0xFF)
        first = self._first_of(found)
        self.workspaces.append(found[first : first + num_bytes])
        return self.workspaces[-1].data_ptr()

    def free(self, address: int) -> None:
        """The memory is for the next one of its size."""

    @staticmethod
    def _first_of(found: torch.Tensor) -> int:
        """The place where the workspace begins, as CUDA's allocator would choose it."""
        return _GUARD - (found.data_ptr() + _GUARD) % 256 + 256

    def check_workspaces(self) -> None:
        """Check that nothing was written around them."""
        for num_bytes, found in self._guarded.items():
            first = self._first_of(found)
            assert bool((found[:first] == 0xFF).all())
            assert bool((found[first + num_bytes :] == 0xFF).all())


class Emulator(GemmEmulator):
    """libcuda, as far as launches need it."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[jit.Kernel] = []
        self.launched: list[SimpleNamespace] = []
        self.captured: dict[int, list] = {}  # stream or graph -> what is launched

    def cuStreamCreate(self, out, flags):
        out._obj.value = 1000 + len(self.captured)
        return 0

    def cuStreamDestroy_v2(self, stream):
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0

    def cuStreamBeginCapture_v2(self, stream, mode):
        self.captured[stream.value] = []
        return 0

    def cuStreamEndCapture(self, stream, graph):
        graph._obj.value = stream.value  # in a graph, each node has the number of its launch
        return 0

    def cuGraphGetNodes(self, graph, nodes, count):
        for i in range(len(self.captured[graph.value])):
            nodes[i] = i + 1
        count._obj.value = len(self.captured[graph.value])
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, out):
        *_, launches = self.captured.values()  # the last is the graph that is being made
        config, function = launches[node.value - 1][:2]
        out._obj.function = function.value
        out._obj.grid_x, out._obj.block_x = config.grid_x, config.block_x
        out._obj.shared_bytes = config.shared_bytes
        return 0

    def cuGraphInstantiateWithFlags(self, executable, graph, flags):
        executable._obj.value = graph.value
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, executable, node, params):
        """The arguments are copied, as CUDA copies them: the last of them is a structure."""
        nodes = self.captured[executable.value]
        config, function, parameters, *_ = nodes[node.value - 1]
        at = params._obj.parameters
        given = list((ctypes.c_void_p * len(parameters)).from_address(at))
        last = ARGUMENTS[self.kernels[function.value - 1].source.stem]
        size = given[-1] - given[0] + ctypes.sizeof(last)
        held = ctypes.create_string_buffer(ctypes.string_at(given[0], size), size)
        copies = [ctypes.addressof(held) + x - given[0] for x in given]
        nodes[node.value - 1] = config, function, copies, held
        return 0

    def cuGraphLaunch(self, executable, stream):
        for config, function, parameters, *_ in self.captured[executable.value]:
            config.stream = stream
            self.launch(config, function, parameters)
        return 0

    def cuGraphExecDestroy(self, executable):
        self.captured.pop(executable.value)
        return 0

    def cuGraphDestroy(self, graph):
        return 0

    def cuTensorMapEncodeTiled(self, at, dtype, rank, address, shape, strides, box, *rest):
        assert rank in (2, 3)
        dtypes = {0: torch.float8_e4m3fn, 7: torch.float32, 9: torch.bfloat16}
        ones, interleave, swizzle, promotion, _ = rest
        assert (list(ones), interleave) == ([1] * rank, 0)
        dtype, swizzle = dtypes[dtype], 16 << swizzle if swizzle else 0
        assert strides[0] >= shape[0] * dtype.itemsize  # rows do not overlap
        # The rules of cuTensorMapEncodeTiled.
        assert all(1 <= x <= 1 << 32 for x in shape)
        assert all(x % 16 == 0 and 0 <= x < 1 << 40 for x in strides[: rank - 1])
        assert all(1 <= x <= 256 for x in box)
        inner = box[0] * dtype.itemsize
        assert inner % 16 == 0
        assert not swizzle or inner <= swizzle
        pitches = [stride // dtype.itemsize for stride in strides[: rank - 1]]
        words = (ctypes.c_uint64 * 16).from_address(at)
        words[0], words[1] = address, len(self.maps)
        made = Map(dtype, address, list(shape), pitches, list(box), swizzle, 32 << promotion)
        self.maps.append(made)
        return 0

    def cuTensorMapReplaceAddress(self, at, address):
        ctypes.c_uint64.from_address(at).value = address
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        config, parameters = config._obj, list(parameters)
        if config.stream in self.captured:
            kept = launch.Config.from_buffer_copy(config)
            self.captured[config.stream].append((kept, function, parameters))
            return 0
        return self.launch(config, function, parameters)

    def launch(self, config, function, parameters):
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
        self.compute(made, parameters)
        return 0

    def compute(self, made, parameters):
        structure = ARGUMENTS[made.kernel.source.stem]
        given = structure.from_address(parameters[-1])
        made.arguments = structure.from_buffer_copy(given)
        bodies = {
            "segments": self.find_segments,
            "tile": self.zero_tile_counter,
            "quantize": self.quantize,
            "transpose": self.transpose,
            "swiglu": self.swiglu,
            "logits": self.logits,
            "softmax": self.top_k,
            "sigmoid": self.top_k,
            "count": self.count,
            "dispatch": self.dispatch,
            "combine": self.combine,
        }
        bodies.get(made.kernel.name.split("_")[0], self.gemm)(made, parameters)

    def quantize(self, made, parameters):
        x, dtype = made.arguments, dtype_of(made.kernel)
        shape, blocks = [x.num_matrices, x.num_rows, x.k], kernels.num_blocks(x.k)
        source_strides = [x.matrix_bytes // dtype.itemsize, x.row_bytes // dtype.itemsize, 1]
        source = memory(x.x, dtype, shape, source_strides)
        data = memory(x.data, torch.float8_e4m3fn, shape, [x.num_rows * x.k, x.k, 1])
        if "1x128" in made.kernel.name:
            found = torch.ops.moefp8.quantize_1x128(source, bool(x.ue8m0), x.min_amax)
            strides = [blocks * x.pitch, 1, x.pitch]
        else:
            found = torch.ops.moefp8.quantize_128x128(source, bool(x.ue8m0))
            strides = [kernels.num_blocks(x.num_rows) * blocks, blocks, 1]
        scales = memory(x.scale_inv, torch.float32, [*found[1].shape], strides)
        for output, y in zip((data, scales), found, strict=True):
            output.copy_(y)

    def transpose(self, made, parameters):
        x = made.arguments
        parts, of_parts = x.num_parts.value, x.num_row_tiles.value * x.num_k_tiles.value
        num_matrices, rest = divmod(made.grid, parts * of_parts)
        assert (rest, made.block, made.shared_bytes) == (0, 256, 128 * 128)
        shape = [num_matrices, parts, x.num_rows, x.k]
        pitches = [x.w_matrix_pitch, x.w_part_pitch, x.w_row_pitch, 1]
        source = memory(x.w, torch.uint8, shape, pitches) if x.num_rows else torch.empty(shape)
        shape = [num_matrices, x.k, parts, x.width]
        pitches = [x.out_matrix_pitch, x.out_row_pitch, x.width, 1]
        out = memory(x.out, torch.uint8, shape, pitches)
        assert x.num_row_tiles.value == kernels.num_blocks(x.width)
        assert x.num_k_tiles.value == kernels.num_blocks(x.k)
        if made.kernel.name.endswith("<true>"):
            assert ((x.w or 0) | x.w_matrix_pitch | x.w_row_pitch | x.k | x.width) % 16 == 0
            assert (x.out | x.out_matrix_pitch | x.out_row_pitch) % 16 == 0
        out[..., x.num_rows :] = 0
        out[..., : x.num_rows] = source.permute(0, 3, 1, 2)

    @staticmethod
    def swiglu(made, parameters):
        if made.kernel.source.stem == "swiglu":
            swiglu_of_rows(made)
        else:
            swiglu_backward(made, dtype_of(made.kernel))

    def logits(self, made, parameters):
        x = made.arguments
        tile = logits_launch.Tile(*map(int, re.findall(r"\d+", made.kernel.name)))
        (tokens,), (weight,) = map(self.maps_at, parameters[:2])
        assert (tokens.box, weight.box) == ([64, tile.tokens], [32, tile.experts])
        assert tokens.swizzle == weight.swizzle == 128
        (h, num_tokens), (_, num_experts) = tokens.shape, weight.shape
        assert (x.num_tokens, x.num_experts) == (num_tokens, num_experts)
        assert x.num_chunks == kernels.ceil_div(h, 256)
        assert x.num_parts == kernels.ceil_div(x.num_chunks, tile.chunks)
        assert x.expert_tiles == kernels.ceil_div(num_experts, tile.experts)
        token_tiles = kernels.ceil_div(num_tokens, tile.tokens)
        assert 1 <= made.grid <= x.num_items == token_tiles * x.expert_tiles * x.num_parts
        assert made.block == tile.threads
        sums = memory(
            x.sums,
            torch.float32,
            [x.num_parts, num_tokens, num_experts],
            [num_tokens * num_experts, num_experts, 1],
        )
        for part, columns in enumerate(torch.arange(h).split(256 * tile.chunks)):
            products = tokens.tensor()[:, columns].double() @ weight.tensor()[:, columns].double().T
            sums[part] = products

    def top_k(self, made, parameters):
        x = made.arguments
        op, items, parts = re.fullmatch(
            r"(\w+)_kernel<.*, (\d+), (\d+)>", made.kernel.name
        ).groups()
        dtype = dtype_of(made.kernel)
        shape = [x.num_tokens, x.num_experts]
        assert int(items) == kernels.ceil_div(x.num_experts, 32) <= 16
        assert made.grid * x.tokens_of_cta >= x.num_tokens > (made.grid - 1) * x.tokens_of_cta
        assert made.block % 32 == 0
        assert made.block // 32 >= x.tokens_of_cta
        assert 32 <= made.block <= (256 if int(parts) else 128)
        assert x.group_lanes.bit_count() == 1
        assert x.group_lanes * x.num_groups <= 32 or x.group_lanes == 1
        if int(parts):
            assert made.programmatic
            strides = [x.num_tokens * x.num_experts, x.num_experts, 1]
            logits = memory(x.logits, dtype, [x.num_parts, *shape], strides).sum(dim=0)
        else:
            strides = [x.row_bytes // dtype.itemsize, x.expert_bytes // dtype.itemsize]
            logits = memory(x.logits, dtype, shape, strides)
        if op == "softmax_topk":
            result = torch.ops.moefp8.softmax_topk(logits, x.top_k, bool(x.renormalize))
        else:
            bias = memory(x.bias, torch.float32, shape[1:], [1]) if x.bias else None
            rest = x.top_k, x.num_groups, x.topk_groups, bool(x.renormalize), x.scaling_factor
            result = torch.ops.moefp8.sigmoid_group_topk(logits, bias, *rest)
        for address, found in zip((x.top_k_index, x.top_k_weights), result, strict=True):
            memory(address, found.dtype, [*found.shape], [x.top_k, 1]).copy_(found)

    @staticmethod
    def plan(routing):
        """Without max_m, every choice has a row of its own; else a token has one of each expert."""
        id_dtype = torch.int64 if routing.is_wide else torch.int32
        strides = [y // id_dtype.itemsize for y in (routing.token_bytes, routing.choice_bytes)]
        ids = memory(routing.ids, id_dtype, [routing.num_tokens, routing.top_k], strides)
        return plan_of(ids, routing.num_experts, routing.max_m or None, routing.first_expert)

    def counts_of(self, x):
        """[chunks, slots] of how many rows each expert has in each chunk of tokens."""
        plan, counts = self.plan(x.routing), torch.zeros(x.num_chunks, x.routing.num_slots)
        is_row = plan.row_to_token >= 0
        at = plan.row_to_token[is_row] // x.routing.chunk, plan.row_to_expert[is_row]
        return counts.index_put(at, torch.ones(()), accumulate=True).short()

    def count(self, made, parameters):
        x = made.arguments
        counts = self.counts_of(x)
        assert (made.grid, made.block) == (x.num_chunks, 128)
        assert f"<{str(x.routing.max_m > 0).lower()}>" in made.kernel.name
        memory(x.counts, torch.int16, [*counts.shape], [counts.shape[1], 1]).copy_(counts)

    def dispatch(self, made, parameters):
        x, dtype = made.arguments, dtype_of(made.kernel)
        routing, h, blocks = x.routing, x.hidden_size, kernels.num_blocks(x.hidden_size)
        assert x.num_k_blocks == blocks
        flags = re.search(r"<(.*)>", made.kernel.name)[1].split(", ")[1:]
        _, merges, is_counted = ([flag == "true" for flag in flags] + [False] * 2)[:3]
        assert merges == (routing.max_m > 0)
        if "few" in made.kernel.name:
            assert routing.num_tokens * routing.top_k <= 32
            assert x.num_parts * x.part_blocks >= blocks
            assert made.grid == routing.num_tokens * x.num_parts + 1
        else:
            assert made.grid == x.num_chunks * x.num_parts
            assert x.num_chunks == kernels.ceil_div(routing.num_tokens, routing.chunk)
        if is_counted:
            shape = [x.num_chunks, routing.num_slots]
            counted = memory(x.counts, torch.int16, shape, [shape[1], 1])
            assert torch.equal(counted, self.counts_of(x))
        assert made.programmatic
        source_strides = [x.x_row_bytes // dtype.itemsize, 1]
        source = memory(x.x, dtype, [routing.num_tokens, h], source_strides)
        data, scale_inv = numerics.quantize_1x128(source, False, x.min_amax)
        plan = self.plan(routing)
        (rows,) = torch.nonzero(plan.row_to_token >= 0, as_tuple=True)
        tokens, num_rows = plan.row_to_token[rows], len(plan.row_to_token)
        codes = memory(x.rows, torch.uint8, [num_rows, h], [x.row_pitch, 1])
        codes[rows] = data.view(torch.uint8)[tokens]
        in_matrix = routing.max_m or num_rows
        shape, strides = [num_rows // in_matrix, blocks, in_matrix], [x.scale_pitch, 1]
        scales = memory(x.row_scales, torch.float32, shape, [blocks * x.scale_pitch, *strides])
        scales[rows // in_matrix, :, rows % in_matrix] = scale_inv[tokens]
        for address, values in (
            (x.zeros, torch.zeros(2)),
            (routing.expert_offsets, plan.expert_offsets),
            (routing.tokens_per_expert, plan.tokens_per_expert),
            (routing.token_to_row, plan.token_to_row.flatten()),
        ):
            memory(address, torch.int32, [len(values)], [1]).copy_(values)

    def combine(self, made, parameters):
        x, dtype = made.arguments, dtype_of(made.kernel)
        shape, h = [x.num_tokens, x.top_k], x.hidden_size
        strides = [y // dtype.itemsize for y in (x.weight_token_bytes, x.weight_choice_bytes)]
        weights = memory(x.weights, dtype, shape, strides)
        token_to_row = memory(x.token_to_row, torch.int32, shape, [x.top_k, 1]).tolist()
        num_rows = 1 + max(0, *map(max, token_to_row))
        y = memory(x.y, torch.bfloat16, [num_rows, h], [x.y_row_bytes // 2, 1])
        out = memory(x.out, torch.bfloat16, [x.num_tokens, h], [h, 1])
        out.copy_(naive.combine(y, token_to_row, weights))
        if x.addend:
            out.copy_(out.float() + memory(x.addend, torch.bfloat16, [x.num_tokens, h], [h, 1]))
        if made.kernel.name.endswith("true>"):
            assert (h * 2 | x.out | (x.addend or 0)) % 16 == 0


@contextmanager
def emulated(
    config: GemmConfig | None = None, gate_up: GemmConfig | None = None, **options
) -> Iterator[FakeDriver]:
    """Launches work on tensors of the CPU.

    config, gate_up: as in `choosing`. options: of `FakeDriver`.
    """
    with jit.using(FakeDriver(**options)) as made, choosing(config, gate_up):
        yield made
        made.check_workspaces()
