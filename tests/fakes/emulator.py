"""A stand-in for a Hopper GPU, so that launchers are tested without one.

A launch computes on the CPU what the kernel would, out of the tensor maps and arguments that it was
given. A wrong address, stride or extent gives a wrong result.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from moefp8 import kernels
from moefp8.kernels import jit
from moefp8.kernels.gemm.sm90 import launch as gemm_launch
from moefp8.kernels.gemm.sm90.config import GemmConfig
from moefp8.kernels.jit import launch
from moefp8.quant import numerics
from tests.fakes.emulated_activation import activation_backward, activation_of_rows
from tests.fakes.emulated_activation_columns import activation_columns
from tests.fakes.emulated_biases import bias_grad, bias_score_grad
from tests.fakes.emulated_columns import columns
from tests.fakes.emulated_gemm import Map, dtype_of, memory
from tests.fakes.emulated_k_grouped import Maps, k_grouped
from tests.fakes.emulated_routing import RoutingEmulator
from tests.gpu import NUM_SMS
from tests.kernels.gemm.cases import choosing

_GUARD = 1 << 12


class FakeDriver(jit.Driver):
    """The driver of a Hopper GPU that works on tensors of the CPU: `jit.using(FakeDriver())`.

    num_sms: how many SMs it has. max_prepared: as in `jit.Driver`.
    library: runs what is launched.
    launched: all launches so far, with what the kernel was given; `gemms` are those of GEMMs.
    capture: the number of the capture that the stream is part of; None: it is part of none.
    """

    def __init__(
        self,
        num_sms: int = NUM_SMS,
        max_prepared: int = 4096,
        library: "Emulator | None" = None,
    ) -> None:
        super().__init__(library or Emulator(), max_prepared)
        self.sms, self.stream = num_sms, 7
        self.capture: int | None = None
        self.launched, self.kernels = self.library.launched, self.library.kernels
        self.maps = self.library.maps
        self.workspaces: list[torch.Tensor] = []
        self._guarded: dict[int, torch.Tensor] = {}

    @property
    def gemms(self) -> list[SimpleNamespace]:
        return [made for made in self.launched if made.kernel.source == gemm_launch.SOURCE]

    def load(self, kernel: jit.Kernel, device_index: int) -> jit.Function:
        if kernel not in self.kernels:
            self.kernels.append(kernel)
        handle = ctypes.c_void_p(self.kernels.index(kernel) + 1)
        return jit.Function(kernel, device_index, handle, 232448)

    def num_sms(self, device_index: int) -> int:
        return self.sms

    def current_stream(self, device_index: int) -> int:
        return self.stream

    def current_device(self) -> int:
        return -1

    def is_capturing(self) -> bool:
        return self.capture is not None

    def capture_id(self, device_index: int) -> int | None:
        return self.capture

    def is_lost(self, function: jit.Function) -> bool:
        return False

    def on_device(self, device_index: int):
        return nullcontext()

    def arch(self, device_index: int) -> str:
        return "sm_90a"

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


class Emulator(RoutingEmulator):
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
        config, function, parameters = launches[node.value - 1]
        out._obj.parameters = ctypes.addressof(parameters)
        out._obj.function = function.value
        out._obj.grid_x, out._obj.block_x = config.grid_x, config.block_x
        out._obj.shared_bytes = config.shared_bytes
        return 0

    def cuGraphInstantiateWithFlags(self, executable, graph, flags):
        executable._obj.value = graph.value
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, executable, node, params):
        nodes = self.captured[executable.value]
        config, function, parameters = nodes[node.value - 1]
        new = type(parameters).from_address(params._obj.parameters)
        nodes[node.value - 1] = config, function, self._copies(function, new)
        return 0

    def _copies(self, function, parameters):
        """The arguments, copied as CUDA copies them: the last of them is a structure."""
        first, last = parameters[0], jit.struct_of(self.kernels[function.value - 1].source)
        size = parameters[-1] - first + ctypes.sizeof(last)
        held = ctypes.create_string_buffer(ctypes.string_at(first, size), size)
        copies = [ctypes.addressof(held) + x - first for x in parameters]
        array = (ctypes.c_void_p * len(copies))(*copies)
        array.held = held  # while the array lives
        return array

    def cuGraphLaunch(self, executable, stream):
        for config, function, parameters in self.captured[executable.value]:
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
        config = config._obj
        if config.stream in self.captured:
            kept = launch.Config.from_buffer_copy(config)
            copies = self._copies(function, parameters)
            self.captured[config.stream].append((kept, function, copies))
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
        self.compute(made, list(parameters))
        return 0

    def compute(self, made, parameters):
        structure = jit.struct_of(made.kernel.source)
        given = structure.from_address(parameters[-1])
        made.arguments = structure.from_buffer_copy(given)
        bodies = {
            "k": self.k_grouped,
            "segments": self.find_segments,
            "tile": self.zero_tile_counter,
            "quantize": self.quantize,
            "transpose": self.transpose,
            "columns": columns,
            "both": self.both,
            "each": self.each,
            "activation": self.activation,
            "bias": self.bias,
            "logits": self.logits,
            "softmax": self.top_k,
            "sigmoid": self.top_k,
            "top": self.top_k_backward,
            "count": self.count,
            "dispatch": self.dispatch,
            "combine": self.combine,
        }
        bodies.get(made.kernel.name.split("_")[0], self.gemm)(made, parameters)

    def k_grouped(self, made, parameters):
        k_grouped(made, self.maps_at(parameters[0], len(Maps._fields)))

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

    def both(self, made, parameters):
        x, dtype = made.arguments, dtype_of(made.kernel)
        n, k, parts = x.num_rows, x.k, x.num_parts.value
        grid = [x.num_row_tiles.value, x.num_k_tiles.value]
        assert grid == [kernels.num_blocks(n), kernels.num_blocks(k)]
        num_matrices, rest = divmod(made.grid, parts * grid[0] * grid[1])
        assert (rest, made.block, made.shared_bytes) == (0, 256, 128 * 128 + 32)
        assert n <= x.width <= grid[0] * 128
        pitches = [x.w_matrix_pitch, x.w_part_pitch, x.w_row_pitch]
        strides = [pitch // dtype.itemsize for pitch in pitches]
        source = memory(x.w, dtype, [num_matrices, parts, n, k], [*strides, 1])
        data = memory(
            x.data, torch.uint8, [num_matrices, parts, n, k], [parts * n * k, n * k, k, 1]
        )
        num_scales = grid[0] * grid[1]
        strides = [parts * num_scales, num_scales, grid[1], 1]
        scales = memory(x.scale_inv, torch.float32, [num_matrices, parts, *grid], strides)
        pitches = [x.transposed_matrix_pitch, x.transposed_row_pitch]
        out = memory(
            x.transposed, torch.uint8, [num_matrices, k, parts, x.width], [*pitches, x.width, 1]
        )
        if made.kernel.name.endswith("true>"):
            assert (x.w | x.w_matrix_pitch | x.w_row_pitch | x.width) % 16 == 0
            assert (x.transposed | x.transposed_matrix_pitch | x.transposed_row_pitch) % 16 == 0
            assert (x.data | k) % 8 == 0
        for matrix in range(num_matrices):
            for part in range(parts):
                codes, found = numerics.quantize_128x128(source[matrix, part])
                data[matrix, part] = codes.view(torch.uint8)
                scales[matrix, part] = found
                out[matrix, :, part, :n] = codes.view(torch.uint8).T
                out[matrix, :, part, n:] = 0

    def each(self, made, parameters):
        x, dtype = made.arguments, dtype_of(made.kernel)
        n, k, parts = x.num_rows, x.k, x.num_parts.value
        *_, vectorized, transposed = made.kernel.name.rstrip(">").split(", ")
        grid = [x.num_row_tiles.value, x.num_k_tiles.value]
        assert grid == [kernels.num_blocks(n), kernels.num_blocks(k)]
        num_matrices, rest = divmod(made.grid, grid[0] * grid[1])
        wanted = 32 + (128 * 128 if transposed == "true" else 0)
        assert (rest, made.block, made.shared_bytes) == (0, 256, wanted)
        for i in range(num_matrices):
            place = x.places[i // 4] >> 16 * (i % 4) & 0xFFFF
            matrix, part = divmod(place, parts)
            codes, found = numerics.quantize_128x128(memory(x.w[i], dtype, [n, k], [k, 1]))
            memory(x.data + place * n * k, torch.uint8, [n, k], [k, 1])[:] = codes.view(torch.uint8)
            at = x.scale_inv + 4 * place * grid[0] * grid[1]
            memory(at, torch.float32, grid, [grid[1], 1])[:] = found
            if vectorized == "true":
                assert (x.w[i] % 16, x.data % 8, k % 8) == (0, 0, 0)
            if transposed == "true":
                at = x.transposed + matrix * x.transposed_matrix_pitch + part * x.width
                out = memory(at, torch.uint8, [k, x.width], [x.transposed_row_pitch, 1])
                out[:, :n], out[:, n:] = codes.view(torch.uint8).T, 0
                if vectorized == "true":
                    assert (x.transposed | x.width | x.transposed_row_pitch) % 16 == 0

    @staticmethod
    def bias(made, parameters):
        {"bias_grad": bias_grad, "bias_score_grad": bias_score_grad}[made.kernel.source.stem](made)

    @staticmethod
    def activation(made, parameters):
        if made.kernel.source.stem == "activation_rows":
            activation_of_rows(made)
        elif made.kernel.source.stem == "activation_columns":
            activation_columns(made)
        else:
            activation_backward(made, dtype_of(made.kernel))


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
