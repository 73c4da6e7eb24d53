"""The JIT room without a GPU: loading, launches and tensor maps; libcuda is `FakeLibcuda`."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.jit import launch
from tests.gpu import ARCH
from tests.kernels.jit.cases import symbol_of, write_kernel

pytestmark = pytest.mark.usefixtures("fresh_jit")

STREAM = 0x7F00_DEAD_BEE0
MAP_BYTES = 128
FUNCTION = 0x7F00_0000_3000
WRITES = {  # what functions write where their first argument points to, by the others
    "cuDriverGetVersion": lambda fake: 12080,
    "cuDeviceGet": lambda fake, index: index,
    "cuDeviceGetAttribute": lambda fake, attribute, device: fake.attributes[attribute],
    "cuDevicePrimaryCtxRetain": lambda fake, device: 0x7F00_0000_1000 + device.value,
    "cuModuleLoadData": lambda fake, image: {b"\x7fELF": 0x7F00_0000_2000}[image[:4]],
    "cuModuleGetFunction": lambda fake, module, symbol: {symbol_of(3).encode(): FUNCTION}[symbol],
    "cuFuncGetAttribute": lambda fake, attribute, function: {1: 48}[attribute],
}


class FakeLibcuda:
    """libcuda as far as we use it. `fails` maps a function's name to results yet to return.

    opaque: whether the address in a tensor map is hidden, rather than its first word.
    """

    def __init__(self, opaque: bool = False) -> None:
        self.key = 0x5A5A_5A5A if opaque else 0
        self.calls: list[str] = []
        self.fails: dict[str, list[int]] = {}
        self.launched: list[tuple] = []
        self.maps: list[list] = []
        self.attributes = {75: 9, 76: 0, 97: 232448}

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if self.fails.get(name):
                return self.fails[name].pop(0)
            if name in WRITES:
                out, *others = arguments
                out._obj.value = WRITES[name](self, *others)
            elif answer := getattr(type(self), f"_{name}", None):
                answer(self, *arguments)
            return 0

        return call

    def _cuGetErrorName(self, result, out):
        out._obj.value = b"CUDA_ERROR_FAKE"

    def _cuLaunchKernelEx(self, config, function, parameters, extra):
        assert extra is None
        copied = launch.Config.from_buffer_copy(config._obj)
        self.launched.append((copied, function.value, list(parameters)))

    def _cuTensorMapEncodeTiled(self, at, *arguments):
        assert at % MAP_BYTES == 0
        plain = [list(x) if isinstance(x, ctypes.Array) else x for x in arguments]
        self.maps.append(plain)
        ctypes.memset(at, 7, MAP_BYTES)
        self._cuTensorMapReplaceAddress(at, plain[2])

    def _cuTensorMapReplaceAddress(self, at, address):
        ctypes.c_uint64.from_address(at).value = address ^ self.key

    def address_in(self, at: int) -> int:
        """The address in a tensor map."""
        return ctypes.c_uint64.from_address(at).value ^ self.key


class HostDriver(jit.Driver):
    """What PyTorch says of CUDA, which it may not have: GPU 0 is the current one."""

    def __init__(self, library: FakeLibcuda) -> None:
        super().__init__(library)
        self.made_current: list[int] = []

    def current_stream(self, device_index: int) -> int:
        return STREAM + device_index

    def current_device(self) -> int:
        return 0

    def arch(self, device_index: int) -> str:
        return ARCH

    @contextmanager
    def on_device(self, device_index: int) -> Iterator[None]:
        self.made_current.append(device_index)
        yield


@pytest.fixture(params=[False], ids=["plain maps"])
def fake(request) -> Iterator[FakeLibcuda]:
    with jit.using(HostDriver(FakeLibcuda(request.param))) as made:
        yield made.library


def load(kernel: jit.Kernel, device_index: int = 0) -> jit.Function:
    return jit.current_driver().load(kernel, device_index)


def test_structures_are_those_of_cuda_h():
    """A C program with CUDA 13.0's cuda.h printed these numbers: sizeof, offsetof."""
    assert ctypes.sizeof(launch.Config) == 56
    offsets = {name: getattr(launch.Config, name).offset for name, _ in launch.Config._fields_}
    assert offsets == {
        **{"grid_x": 0, "grid_y": 4, "grid_z": 8, "block_x": 12, "block_y": 16, "block_z": 20},
        **{"shared_bytes": 24, "stream": 32, "attributes": 40, "num_attributes": 48},
    }
    assert ctypes.sizeof(launch.Attribute) == 72
    assert launch.Attribute.value.offset == 8


def test_load_once_per_kernel_and_gpu(tmp_path, fake):
    kernel = write_kernel(tmp_path)
    function = load(kernel)
    assert load(kernel) is function
    assert function.handle.value == FUNCTION
    assert jit.current_driver().primary_context(0) == 0x7F00_0000_1000
    assert function.max_shared_bytes == 232448 - 48
    load(kernel, 1)
    assert jit.current_driver().primary_context(1) == 0x7F00_0000_1001
    assert fake.calls.count("cuModuleLoadData") == 2
    loaded = fake.calls.index("cuModuleLoadData")
    around = [x for x in fake.calls[:loaded] if x.startswith(("cuCtx", "cuThread"))]
    assert around == ["cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent_v2"]
    for name in ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"):
        assert fake.calls.count(name) == 2
    assert fake.calls.count("cuThreadExchangeStreamCaptureMode") == 4


@pytest.mark.parametrize(
    ("result", "capability", "error", "told"),
    [
        (1, 9, jit.JitError, r"fill<3> on cuda:0: cannot be loaded: CUDA_ERROR_FAKE \(1\)"),
        (2, 9, torch.cuda.OutOfMemoryError, r"torch\.cuda\.empty_cache"),
        (200, 9, jit.JitError, r"driver knows CUDA 12\.8.* 580 .*nvidia-cuda-nvrtc-cu12"),
        (209, 8, jit.JitError, r"compiled for sm_90a, the GPU has compute capability 8\.0"),
        (222, 9, jit.JitError, r"driver knows CUDA 12\.8"),
    ],
)
def test_a_failed_load_says_what_to_do(tmp_path, fake, result, capability, error, told):
    fake.fails["cuModuleLoadData"] = [result]
    fake.attributes[75] = capability
    kernel = write_kernel(tmp_path)
    with pytest.raises(error, match=told):
        load(kernel)
    assert fake.calls[-2:].count("cuThreadExchangeStreamCaptureMode") == 1  # all is put back
    assert fake.calls.count("cuCtxPushCurrent_v2") == fake.calls.count("cuCtxPopCurrent_v2") == 1
    assert load(kernel).handle  # and once the cause is gone, it loads


def test_without_a_driver_the_error_says_so(tmp_path, monkeypatch):
    def no_library(name, *arguments, **options):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(jit.JitError, match=r"no NVIDIA driver .*libcuda\.so\.1.*install one"):
        jit.Driver().version()


# Launches


class Numbers(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("data", ctypes.c_void_p), ("factor", ctypes.c_float))


def make_launch(tmp_path: Path, *arguments, pointers=(), device_index=0, **options) -> jit.Launch:
    function = load(write_kernel(tmp_path), device_index)
    return jit.Launch(function, 132, 384, arguments, pointers, **options)


def make_map() -> jit.TensorMaps:
    return jit.tensor_map(jit.Box(torch.uint8, (64, 8), (64,), (64, 8), 64))


def test_a_launch_is_one_call(tmp_path, fake):
    prepared = make_launch(tmp_path, Numbers(), shared_bytes=1000, cluster=2, programmatic=True)
    fake.calls.clear()
    for stream in (STREAM, 8):
        prepared(stream, ())
    assert fake.calls == ["cuLaunchKernelEx"] * 2
    assert [config.stream for config, *_ in fake.launched] == [STREAM, 8]
    config, function, parameters = fake.launched[0]
    grid = (config.grid_x, config.grid_y, config.grid_z)
    block = (config.block_x, config.block_y, config.block_z)
    assert (grid, block, config.shared_bytes) == ((132, 1, 1), (384, 1, 1), 1000)
    assert (function, len(parameters)) == (FUNCTION, 1)
    attributes = (launch.Attribute * config.num_attributes).from_address(config.attributes)
    found = [(x.id, list(x.value), x.rest) for x in attributes]
    assert found == [(4, [2, 1, 1], b""), (6, [1, 0, 0], b"")]


def test_a_plain_launch_has_no_attributes(tmp_path, fake):
    make_launch(tmp_path)(STREAM, ())
    ((config, _, parameters),) = fake.launched
    assert (config.num_attributes, config.attributes, parameters) == (0, None, [])


@pytest.mark.parametrize("fake", [False, True], ids=["plain maps", "opaque maps"], indirect=True)
def test_a_call_writes_its_addresses_and_nothing_else(tmp_path, fake):
    """It does so where a tensor map hides its address, too: then libcuda replaces it."""
    both = jit.join_maps([make_map()] * 2)
    assert both.begin_with_address == (fake.key == 0)
    prepared = make_launch(
        tmp_path,
        Numbers(3, 16, 1.5), both, Numbers(4, 32, 2.5),
        pointers=[
            jit.Pointer(0, Numbers.data.offset, jit.Source(1, 24)),
            jit.Pointer(1, MAP_BYTES, jit.Source(0, 256)),
        ],
    )  # fmt: skip
    fake.calls.clear()
    for first, second in ((1 << 20, 1 << 21), (1 << 22, 1 << 21), (1 << 20, 1 << 30)):
        for _ in range(2):
            prepared(STREAM, (first, second))
        numbers, maps, others = fake.launched[-1][-1]
        assert maps % MAP_BYTES == 0
        found = Numbers.from_address(numbers)
        assert (found.count, found.data, found.factor) == (3, second + 24, 1.5)
        found = Numbers.from_address(others)
        assert (found.count, found.data, found.factor) == (4, 32, 2.5)
        assert ctypes.string_at(maps, MAP_BYTES) == both.data[:MAP_BYTES]
        assert fake.address_in(maps + MAP_BYTES) == first + 256
        assert ctypes.string_at(maps + MAP_BYTES + 8, 120) == b"\7" * 120
    assert fake.calls.count("cuTensorMapReplaceAddress") == (3 if fake.key else 0)
    assert len(fake.launched) == 6


def test_what_was_prepared_from_is_copied(tmp_path, fake):
    """Two launches of the same arguments do not share them."""
    arguments = Numbers(3, 16, 1.5), make_map()
    pointers = [jit.Pointer(1, 0, jit.Source(0))]
    one, other = (make_launch(tmp_path, *arguments, pointers=pointers) for _ in range(2))
    one(STREAM, (1 << 20,))
    other(STREAM, (1 << 21,))
    one(STREAM, (1 << 20,))
    maps = [parameters[1] for _, _, parameters in fake.launched]
    assert [fake.address_in(at) for at in maps] == [1 << 20, 1 << 21, 1 << 20]


@pytest.mark.parametrize(
    ("captures", "status", "expected"),
    [(True, 1, 12), (True, 0, None), (True, 2, None), (False, 1, None)],
)
def test_a_capture_has_a_number(fake, captures, status, expected):
    class Capturing(HostDriver):
        def is_capturing(self) -> bool:
            return captures

    def tell(stream, out, number, *nothing):
        assert (stream, nothing) == (STREAM + 3, (None,) * 3)
        out._obj.value, number._obj.value = status, 12
        return 0

    fake.cuStreamGetCaptureInfo_v2 = tell
    assert Capturing(fake).capture_id(3) == expected


@pytest.mark.parametrize("fake", [True], ids=["opaque maps"], indirect=True)
def test_after_an_address_that_is_refused_the_one_before_is_written_again(tmp_path, fake):
    places = (0, Numbers.data.offset), (1, 0)
    pointers = [jit.Pointer(*place, jit.Source(0)) for place in places]
    prepared = make_launch(tmp_path, Numbers(), make_map(), pointers=pointers)
    prepared(STREAM, (1 << 20,))
    fake.fails["cuTensorMapReplaceAddress"] = [1]
    with pytest.raises(jit.JitError, match=r"fill<3> on cuda:0: .*map.*FAKE \(1\)"):
        prepared(STREAM, (1 << 21,))
    assert len(fake.launched) == 1
    prepared(STREAM, (1 << 20,))
    numbers, maps = fake.launched[-1][-1]
    assert (Numbers.from_address(numbers).data, fake.address_in(maps)) == (1 << 20, 1 << 20)


@pytest.mark.parametrize("fake", [False, True], ids=["plain maps", "opaque maps"], indirect=True)
def test_a_thread_without_a_context_makes_and_patches_maps_too(tmp_path, fake):
    fake.fails = {name: [201] for name in ("cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress")}
    made = make_map()
    assert made.begin_with_address == (fake.key == 0)
    prepared = make_launch(tmp_path, made, pointers=[jit.Pointer(0, 0, jit.Source(0))])
    fake.calls.clear()
    fake.fails = {"cuTensorMapReplaceAddress": [201]}
    prepared(STREAM, (1 << 20,))
    assert fake.address_in(fake.launched[0][-1][0]) == 1 << 20
    push, replace, pop = "cuCtxPushCurrent_v2", "cuTensorMapReplaceAddress", "cuCtxPopCurrent_v2"
    assert fake.calls[:-1] == ([replace, push, replace, pop] if fake.key else [])


def test_a_launch_goes_to_the_current_stream_of_its_gpu(tmp_path, fake):
    for device_index, made_current in ((0, []), (1, [1])):
        make_launch(tmp_path, device_index=device_index).on(device_index, ())
        assert jit.current_driver().made_current == made_current
        assert fake.launched[-1][0].stream == STREAM + device_index


@pytest.mark.parametrize("result", [201, 400])
def test_a_thread_without_the_context_launches_too(tmp_path, fake, result):
    prepared = make_launch(tmp_path)
    fake.calls.clear()
    fake.fails["cuLaunchKernelEx"] = [result]
    prepared(STREAM, ())
    push, pop = "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"
    assert fake.calls == ["cuLaunchKernelEx", push, "cuLaunchKernelEx", pop]
    assert len(fake.launched) == 1


@pytest.mark.parametrize(
    ("results", "told"),
    [
        ([1], ""),
        ([400, 400], ""),  # the handle of a stream is lost, for instance
        *(([result], ".*restart the process") for result in (214, 700, 719)),
    ],
)
def test_a_failed_launch_names_kernel_and_configuration(tmp_path, fake, results, told):
    prepared = make_launch(tmp_path, cluster=4)
    fake.fails["cuLaunchKernelEx"] = list(results)
    named = rf"fill<3> on cuda:0: .*grid=132.*cluster=4.*FAKE \({results[0]}\){told}"
    with pytest.raises(jit.JitError, match=named):
        prepared(STREAM, ())
    assert fake.launched == []
    prepared(STREAM, ())
    assert fake.calls.count("cuModuleLoadData") == 1  # the context is not lost


LOSSES = {
    "the context is gone": {"cuLaunchKernelEx": [709], "cuCtxPushCurrent_v2": [709]},
    "it cannot be the current one": {"cuLaunchKernelEx": [201], "cuCtxPushCurrent_v2": [201]},
    "there is another": {"cuLaunchKernelEx": [400, 400], "cuFuncGetAttribute": [400]},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_after_the_loss_of_a_context_kernels_are_loaded_again(tmp_path, fake, loss):
    prepared, other = make_launch(tmp_path), make_launch(tmp_path)
    fake.fails.update({name: list(results) for name, results in LOSSES[loss].items()})
    with pytest.raises(jit.JitError, match=r"fill<3> on cuda:0: .*create them again, then repeat"):
        prepared(STREAM, ())
    assert (fake.launched, bool(load(write_kernel(tmp_path)).handle)) == ([], False)
    fake.fails["cuLaunchKernelEx"] = [400]  # for want of a function
    prepared(STREAM, ())
    other(STREAM, ())
    assert [function for _, function, _ in fake.launched] == [FUNCTION] * 2
    for name in ("cuModuleLoadData", "cuFuncSetAttribute", "cuDevicePrimaryCtxRetain"):
        assert fake.calls.count(name) == 2
    assert fake.calls.count("cuCtxPopCurrent_v2") == fake.calls.count("cuCtxPushCurrent_v2") - (
        "cuCtxPushCurrent_v2" in LOSSES[loss]
    )


def test_too_much_shared_memory_is_refused_at_once(tmp_path, fake):
    make_launch(tmp_path, shared_bytes=232400)
    with pytest.raises(jit.JitError, match="shared_bytes must be at most 232400, got 232401"):
        make_launch(tmp_path, shared_bytes=232401)


# Tensor maps

GOOD = jit.Box(
    torch.float8_e4m3fn, shape=(7168, 100), strides_bytes=(7168,), box=(128, 64), swizzle_bytes=128
)


def test_what_a_tensor_map_is_encoded_of(fake):
    made = jit.tensor_map(GOOD)
    assert made.data[8:] == b"\7" * 120
    assert made.begin_with_address
    (found,) = fake.maps
    # type, rank, an address, shape, strides, box, element strides, then interleave: none, swizzle:
    # 128 B, L2 promotion: 256 B, out of bounds: zeros
    assert found[:2] == [0, 2]
    assert found[2] % 16 == 0
    assert found[3] == [7168, 100]
    assert found[4][:1] == [7168]
    assert found[5:] == [[128, 64], [1, 1], 0, 3, 3, 0]
    assert jit.tensor_map(GOOD) is made


@pytest.mark.parametrize(
    ("change", "place", "number"),
    [
        ({"l2_bytes": 64}, -2, 1),
        ({"l2_bytes": 128}, -2, 2),
        ({"dtype": torch.uint8}, 0, 0),
        ({"dtype": torch.float32, "box": (32, 64)}, 0, 7),
        ({"dtype": torch.bfloat16, "box": (64, 64)}, 0, 9),
    ],
)
def test_numbers_of_cuda_h_in_tensor_maps(fake, change, place, number):
    jit.tensor_map(GOOD._replace(**change))
    assert fake.maps[0][place] == number


def test_what_the_driver_refuses_is_shown(fake):
    fake.fails["cuTensorMapEncodeTiled"] = [1]
    with pytest.raises(jit.JitError, match=r"\(7168, 100\).*\(128, 64\).*FAKE"):
        jit.tensor_map(GOOD)
