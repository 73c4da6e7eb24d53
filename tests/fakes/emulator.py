"""A stand-in for a Hopper GPU, so that launchers are tested without one.

A launch computes on the CPU what the kernel would, out of the tensor maps and arguments that it was
given. A wrong address, stride or extent gives a wrong result.
"""

import ctypes
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from moefp8 import kernels
from moefp8.kernels import jit
from moefp8.kernels.common import fp8
from moefp8.kernels.common.inputs import INPUTS
from moefp8.kernels.gemm import config as gemm_config
from moefp8.kernels.gemm import heuristic
from moefp8.kernels.gemm import launch as gemm_launch
from moefp8.kernels.gemm.config import GroupLayout
from moefp8.kernels.jit import launch
from moefp8.quant import quantize_launch as quantize_room
from moefp8.routing import combine_launch, dispatch_launch, top_k_launch
from moefp8.routing import top_k_op as top_k
from tests.fakes.emulated_gemm import GemmEmulator, Map, copy_of, memory
from tests.gpu import NUM_SMS
from tests.kernels.gemm.cases import BIAS_NAMES

_GUARD = 1 << 12
ARGUMENTS = {
    "quantize": quantize_room._Arguments,
    "dispatch": dispatch_launch._Arguments,
    "combine": combine_launch._Arguments,
    "top_k": top_k_launch._Arguments,
}


class FakeDriver(jit.Driver):
    """The driver of a Hopper GPU that works on tensors of the CPU: `jit.using(FakeDriver())`.

    num_sms: how many SMs it has. max_prepared: as in `jit.Driver`.
    library: runs what is launched.
    launched: all launches so far, with what the kernel was given.
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
        self.maps, self.config_of = self.library.maps, self.library.config_of
        self.chosen: list[tuple[int, ...]] = []
        self.workspaces: list[torch.Tensor] = []
        self._guarded: dict[int, torch.Tensor] = {}

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
        """Of each size the same memory, of NaN and never written before."""
        found = self._guarded.get(num_bytes)
        if found is None:
            found = torch.empty(num_bytes + 2 * _GUARD + 256, dtype=torch.uint8)
            self._guarded[num_bytes] = found
        found.fill_(0xFF)
        first = self._first_of(found)
        self.workspaces.append(found[first : first + num_bytes])
        return self.workspaces[-1].data_ptr()

    def free(self, address: int) -> None:
        """It is for the next one of its size."""

    @staticmethod
    def _first_of(found: torch.Tensor) -> int:
        """Where the workspace begins, which lies as CUDA's allocator would place it."""
        return _GUARD - (found.data_ptr() + _GUARD) % 256 + 256

    def check_workspaces(self) -> None:
        """Nothing is written around them."""
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
        *_, launches = self.captured.values()  # of the graph that is being made
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
        last = ARGUMENTS.get(self.kernels[function.value - 1].source.stem, gemm_launch.Arguments)
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
        bodies = {
            "quantize": self.quantize,
            "softmax": self.top_k,
            "sigmoid": self.top_k,
            "count": self.count,
            "dispatch": self.dispatch,
            "combine": self.combine,
        }
        bodies.get(made.kernel.name.split("_")[0], self.gemm)(made, parameters)

    def quantize(self, made, parameters):
        made.arguments = x = copy_of(quantize_room._Arguments, parameters[0])
        dtype = next(d for d, name in INPUTS.items() if f"<{name}," in made.kernel.name)
        size, by_rows = dtype.itemsize, "1x128" in made.kernel.name
        shape, blocks = [x.num_matrices, x.num_rows, x.k], kernels.num_blocks(x.k)
        source = memory(x.x, dtype, shape, [x.matrix_bytes // size, x.row_bytes // size, 1])
        data = memory(x.data, torch.float8_e4m3fn, shape, [x.num_rows * x.k, x.k, 1])
        if by_rows:
            strides = [blocks * x.pitch, 1, x.pitch]
            scales = memory(x.scale_inv, torch.float32, [*shape[:2], blocks], strides)
        else:
            row_blocks = kernels.num_blocks(x.num_rows)
            strides = [row_blocks * blocks, blocks, 1]
            scales = memory(x.scale_inv, torch.float32, [shape[0], row_blocks, blocks], strides)
        quantize = fp8.quantize_1x128 if by_rows else fp8.quantize_128x128
        for matrix, codes, of_codes in zip(source, data, scales, strict=True):
            for output, found in zip(
                (codes, of_codes), quantize(matrix, bool(x.ue8m0)), strict=True
            ):
                output.copy_(found)

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
        data, scale_inv = fp8.quantize_1x128(source, False)
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
            (x.zeros, [0, 0]),
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


@contextmanager
def emulated(
    config: gemm_config.GemmConfig | None = None,
    gate_up: gemm_config.GemmConfig | None = None,
    **options: int,
) -> Iterator[FakeDriver]:
    """Launches work on tensors of the CPU.

    config, and of gate and up gate_up: instead of what is chosen. options: of `FakeDriver`.
    """
    made = FakeDriver(**options)

    def remember(chosen):
        layouts = GroupLayout if chosen.grouped else [None]
        names = [chosen.kernel_name(bias, layout) for bias in BIAS_NAMES for layout in layouts]
        made.config_of.update(dict.fromkeys(names, chosen))
        return chosen

    def telling(choose, instead):
        def choose_and_tell(*arguments):
            *shape, num_sms, _ = arguments
            made.chosen.append((*shape, num_sms))
            return remember(instead or choose(*arguments))

        return choose_and_tell

    with pytest.MonkeyPatch.context() as patch, jit.using(made):
        for name in ("choose_config", "choose_grouped_config"):
            patch.setattr(heuristic, name, telling(getattr(heuristic, name), config))
        choose_both = heuristic.choose_experts_configs

        def choose_both_and_tell(*arguments):
            chosen = choose_both(*arguments)
            return remember(gate_up or chosen[0]), remember(config or chosen[1])

        patch.setattr(heuristic, "choose_experts_configs", choose_both_and_tell)
        yield made
        made.check_workspaces()
