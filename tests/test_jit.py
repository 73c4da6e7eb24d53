"""The JIT room without a GPU: compiling, the disk cache, and the driver behind a stand-in.

NVRTC is real here; libcuda is `FakeDriver`.
"""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda.pathfinder
import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.jit import cache, driver, kernel, launch, module, tma
from moefp8.kernels.jit.nvrtc import Nvrtc
from moefp8.kernels.jit.once import Once

JIT_FOLDER = Path(jit.__file__).parent

SOURCE = """
#include "value.cuh"
namespace a {
template <int N> __global__ void fill(float* p, float x) { p[threadIdx.x] = kValue * N + x; }
}
__global__ void refill() {}
"""


@pytest.fixture(autouse=True)
def _fresh(own_cache, monkeypatch):
    """An empty cache, in memory and on disk; nothing loaded."""
    monkeypatch.delenv("MOEFP8_COMPILER", raising=False)
    _forget()
    monkeypatch.setattr(cache, "_num_warned", iter(range(1000)))
    yield
    _forget()


def _forget() -> None:
    for memory in (cache._memory, module._functions, driver._contexts):
        memory.clear()
    tma._encode.cache_clear()


@pytest.fixture
def compiles(monkeypatch) -> list[str]:
    """The name of every kernel that is compiled rather than found."""
    names = []
    real = Nvrtc.compile

    def compile_and_tell(self, program, options):
        names.append(program.expression)
        return real(self, program, options)

    monkeypatch.setattr(Nvrtc, "compile", compile_and_tell)
    return names


def write_kernel(folder: Path, name: str = "a::fill<3>", source: str = SOURCE) -> jit.Kernel:
    (folder / "value.cuh").write_text('#include "inner.cuh"\n')
    (folder / "inner.cuh").write_text("constexpr float kValue = 2;\n")
    (folder / "fill.cu").write_text(source)
    return jit.Kernel(folder / "fill.cu", name)


def entry_of(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache").iterdir()
    return path


def python_without_torch(code: str, **environment: str) -> "subprocess.Popen[str]":
    """Runs code in a new process in which `room` is the JIT room; what compiles needs no torch."""
    code = f"""
import sys, types
room = types.ModuleType("room")
room.__path__ = [{str(JIT_FOLDER)!r}]
sys.modules["room"] = room
{code}
assert "torch" not in sys.modules
"""
    environment = {**os.environ, **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **pipes)


# Compiling


def test_a_kernel_becomes_a_cubin(tmp_path):
    cubin = jit.compile_kernel(write_kernel(tmp_path))
    assert cubin.image.startswith(b"\x7fELF")
    assert cubin.symbol == "_ZN1a4fillILi3EEEvPff"
    assert cubin.symbol.encode() in cubin.image
    assert "Used" in cubin.log  # registers
    assert cubin.problems() == []


def test_several_at_once_keep_their_order(tmp_path, compiles):
    names = [f"a::fill<{i}>" for i in range(4)]
    kernels = [write_kernel(tmp_path, name) for name in names]
    cubins = jit.compile_kernels([*kernels, kernels[0]], num_threads=2)
    assert [cubin.symbol for cubin in cubins] == [f"_ZN1a4fillILi{i}EEEvPff" for i in "01230"]
    assert sorted(compiles) == names
    assert jit.compile_kernels([]) == []


def test_a_compile_error_shows_kernel_options_and_log(tmp_path):
    broken = write_kernel(tmp_path, "a::fill<1>", SOURCE.replace("kValue *", "no_such_name *"))
    with pytest.raises(jit.JitError) as caught:
        jit.compile_kernel(broken)
    for part in ("fill.cu: a::fill<1>", str(broken.source), *kernel.OPTIONS, "no_such_name"):
        assert part in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["a::nothing<3>", "a::fill<", "a::fill<void>"])
def test_a_wrong_name_is_a_compile_error(tmp_path, name):
    with pytest.raises(jit.JitError, match=r"fill\.cu: a::.* does not compile"):
        jit.compile_kernel(write_kernel(tmp_path, name))


@pytest.mark.parametrize("name", ["nowhere.cuh", "../outside.cuh"])
def test_an_include_comes_from_beside_or_from_device(tmp_path, name):
    (tmp_path / "outside.cuh").touch()
    (tmp_path / "in").mkdir()
    kernel = write_kernel(tmp_path / "in", source=f'  #  include "{name}"\n')
    with pytest.raises(jit.JitError, match=f"{name}.*not found in .*device"):
        jit.compile_kernel(kernel)


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(jit.JitError, match=r"none\.cu cannot be read"):
        jit.compile_kernel(jit.Kernel(tmp_path / "none.cu", "k"))


SPILLS = """
__global__ void __launch_bounds__(1024) spills(float* p) {
  float x[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("ld.global.f32 %0, [%1];" : "=f"(x[i]) : "l"(p + i));
#pragma unroll
  for (int i = 0; i < 128; ++i) p[i] = x[127 - i] * x[i];
}
"""
# An accumulator is touched while WGMMAs are in flight.
SERIAL = """
__global__ void __launch_bounds__(128) serial(float* p, unsigned long long a) {
  float x = p[0], y = p[1], z = p[2], w = p[3];
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 2; ++i, x += 1)
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %4, "
                 "1, 1, 1;" : "+f"(x), "+f"(y), "+f"(z), "+f"(w) : "l"(a));
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  p[0] = x + y + z + w;
}
"""


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [("spills", SPILLS, "bytes spill stores"), ("serial", SERIAL, "are serialized")],
)
def test_the_log_scan_sees_what_costs_speed(tmp_path, name, source, problem):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a user is not bothered
        cubin = jit.compile_kernel(write_kernel(tmp_path, name, source))
    assert any(problem in line for line in cubin.problems()), cubin.log


def test_the_log_scan_sees_an_ignored_setmaxnreg():
    log = "ptxas info : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to allow debugging"
    assert jit.Cubin(b"", "", f"fine\n  {log}\n").problems() == [log]


def test_without_nvrtc_the_error_says_what_to_install(tmp_path, monkeypatch):
    def find(name):
        raise cuda.pathfinder.DynamicLibNotFoundError("not on this machine")

    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", find)
    monkeypatch.setattr(kernel, "_found", Once())
    with pytest.raises(jit.JitError, match=r"pip install nvidia-cuda-nvrtc(.|\n)*not on this mach"):
        jit.compile_kernel(write_kernel(tmp_path))


def test_the_version_tells_builds_apart():
    assert kernel._compiler().version.startswith("nvrtc CL-")


# nvcc


def test_an_unknown_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFP8_COMPILER", "gcc")
    with pytest.raises(jit.JitError, match="must be nvrtc or nvcc, got 'gcc'"):
        jit.compile_kernel(write_kernel(tmp_path))


def test_without_nvcc_the_error_says_where_it_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFP8_COMPILER", "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernel, "_found", Once())
    with pytest.raises(jit.JitError, match=r"no nvcc is in \$CUDA_HOME/bin or PATH"):
        jit.compile_kernel(write_kernel(tmp_path))


def test_nvcc_s_kernel_is_found_in_its_elf_file(tmp_path, monkeypatch):
    """nvcc is a script that hands out what NVRTC made of the same source, `refill` included."""
    (tmp_path / "bin").mkdir()
    image, nvcc = tmp_path / "image", tmp_path / "bin" / "nvcc"
    by_nvrtc = jit.compile_kernel(write_kernel(tmp_path))
    image.write_bytes(by_nvrtc.image)
    nvcc.write_text(f"""#!/bin/sh
test "$1" = --version && echo V1.2.3 && exit
while [ "$1" != -o ]; do shift; done
cat "$3" && test -e "$(dirname "$3")/inner.cuh" && cp {image} "$2"
""")
    nvcc.chmod(0o755)
    monkeypatch.setenv("MOEFP8_COMPILER", "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "_found", Once())
    cubin = jit.compile_kernel(write_kernel(tmp_path))
    assert (cubin.image, cubin.symbol) == (by_nvrtc.image, by_nvrtc.symbol)
    assert "(a::fill<3>)" in cubin.log
    with pytest.raises(jit.JitError, match="one kernel ill"):
        jit.compile_kernel(write_kernel(tmp_path, "a::ill<3>"))


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on PATH")
def test_a_real_nvcc_agrees_on_the_symbol(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFP8_COMPILER", "nvcc")
    monkeypatch.setattr(kernel, "_found", Once())
    cubin = jit.compile_kernel(write_kernel(tmp_path))
    assert cubin.symbol == "_ZN1a4fillILi3EEEvPff"
    assert "Used" in cubin.log


# The cache


def test_the_second_process_finds_it_on_disk(tmp_path, compiles):
    kernel = write_kernel(tmp_path)
    first = jit.compile_kernel(kernel)
    assert jit.compile_kernel(kernel) is first
    _forget()
    assert jit.compile_kernel(kernel) == first
    assert len(compiles) == 1
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["fill.cu", "value.cuh", "inner.cuh"])
def test_a_change_of_any_file_compiles_anew(tmp_path, compiles, name):
    kernel = write_kernel(tmp_path)
    jit.compile_kernel(kernel)
    with open(tmp_path / name, "a") as file:
        file.write("// changed\n")
    jit.compile_kernel(kernel)
    assert len(compiles) == 2


def test_the_place_of_the_source_does_not_matter(tmp_path, compiles):
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        jit.compile_kernel(write_kernel(folder))
    assert len(compiles) == 1


def test_another_compiler_compiles_anew(tmp_path, compiles, monkeypatch):
    jit.compile_kernel(write_kernel(tmp_path))
    monkeypatch.setattr(kernel._compiler(), "version", "nvrtc of tomorrow")
    jit.compile_kernel(write_kernel(tmp_path))
    assert len(compiles) == 2


def flip_a_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: b"",
        lambda data: b"?",
    ],
    ids=["bit", "end", "header", "empty", "other"],
)
def test_a_damaged_entry_is_replaced(tmp_path, compiles, damage):
    kernel = write_kernel(tmp_path)
    jit.compile_kernel(kernel)
    path = entry_of(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    _forget()
    again = jit.compile_kernel(kernel)
    assert len(compiles) == 2
    _forget()
    assert jit.compile_kernel(kernel) == again
    assert len(compiles) == 2
    assert entry_of(tmp_path) == path


def test_an_entry_under_another_kernel_s_key_is_refused():
    data = jit.Cubin(b"image", "symbol", "log").to_bytes("key")
    assert jit.Cubin.from_bytes("key", data) == jit.Cubin(b"image", "symbol", "log")
    assert jit.Cubin.from_bytes("yek", data) is None


def below_a_file(folder, monkeypatch):
    folder.parent.joinpath("file").touch()
    monkeypatch.setenv("MOEFP8_CACHE_DIR", str(folder.parent / "file" / "cache"))


def without_a_home(folder, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MOEFP8_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/ignored")
    monkeypatch.setattr(Path, "home", home)


def open_to_all(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o777)


def owned_by_another(folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def full_disk(folder, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(
    ("obstacle", "told"),
    [
        (below_a_file, "Not a directory"),
        (without_a_home, "home directory"),
        (open_to_all, "others may write"),
        (owned_by_another, "belongs to another user"),
        (full_disk, "No space left"),
    ],
)
def test_without_a_folder_it_works_from_memory_and_says_so_once(
    tmp_path, compiles, monkeypatch, obstacle, told
):
    obstacle(tmp_path / "cache", monkeypatch)
    kernels = [write_kernel(tmp_path, f"a::fill<{i}>") for i in (1, 2, 1)]
    with pytest.warns(UserWarning, match="^moefp8: ") as caught:
        jit.compile_kernels(kernels, num_threads=1)
    (warning,) = caught
    assert told in str(warning.message)
    assert compiles == ["a::fill<1>", "a::fill<2>"]
    left = tmp_path / "cache"
    assert not left.exists() or list(left.iterdir()) == []


def test_the_folder_is_the_user_s_cache_folder(monkeypatch):
    monkeypatch.delenv("MOEFP8_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache.cache_folder() == Path("/some/cache/moefp8")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "moefp8"


def test_processes_share_a_cold_cache(tmp_path):
    kernel = write_kernel(tmp_path)
    code = f"""
import pathlib
from room.kernel import Kernel, compile_kernel
print(compile_kernel(Kernel(pathlib.Path({str(kernel.source)!r}), {kernel.name!r})).symbol)
"""
    processes = [python_without_torch(code) for _ in range(8)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert outputs == ["_ZN1a4fillILi3EEEvPff\n"] * 8
    assert entry_of(tmp_path).suffix == ".cubin"  # and nothing else is left


# Threads and forks


def test_threads_compile_a_kernel_once(tmp_path, compiles):
    kernel = write_kernel(tmp_path)
    barrier = threading.Barrier(8)

    def ask(_):
        barrier.wait(timeout=10)
        return jit.compile_kernel(kernel)

    with ThreadPoolExecutor(8) as pool:
        cubins = list(pool.map(ask, range(8)))
    assert len(set(map(id, cubins))) == 1
    assert len(compiles) == 1


def test_different_keys_build_at_the_same_time():
    once: Once[int, int] = Once()
    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: once.get(key, lambda: both.wait(timeout=10)), range(2)))


def test_a_failed_build_is_tried_again():
    once: Once[str, int] = Once()
    with pytest.raises(ZeroDivisionError):
        once.get("key", lambda: 1 // 0)
    assert once.get("key", lambda: 1) == 1


def test_a_fork_while_a_thread_builds():
    code = """
import os, signal, threading
from room.once import Once
once, building, end = Once(), threading.Event(), threading.Event()
build = lambda: (building.set(), end.wait(20), "parent")[-1]
thread = threading.Thread(target=lambda: once.get("key", build))
thread.start()
building.wait()
child = os.fork()
if child == 0:
    signal.alarm(5)  # rather than hang
    os._exit(once.get("key", lambda: 7))
status = os.waitpid(child, 0)[1]
end.set()
thread.join()
print(os.waitstatus_to_exitcode(status), once.get("key", None))
"""
    process = python_without_torch(code, PYTHONWARNINGS="ignore")
    assert process.communicate(timeout=30)[0] == "7 parent\n"


def test_importing_opens_no_library_and_no_folder(tmp_path):
    code = """
import torch
def opened():
    return {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
before = opened()
import moefp8.kernels.jit
print([name for name in opened() - before if "nvrtc" in name or "libcuda" in name])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert not (tmp_path / "cache").exists()


# The driver


class FakeDriver:
    """libcuda as far as we use it. `fails` maps a function's name to results yet to return."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, list[int]] = {}
        self.launched: list[tuple] = []
        self.maps: list[tuple] = []
        self.capability = {75: 9, 76: 0}

    def __getattr__(self, name):
        answer = getattr(type(self), f"_{name}", lambda self, *arguments: None)

        def call(*arguments):
            self.calls.append(name)
            if self.fails.get(name):
                return self.fails[name].pop(0)
            answer(self, *arguments)
            return 0

        return call

    def _cuGetErrorName(self, result, out):
        out._obj.value = b"CUDA_ERROR_FAKE"

    def _cuDriverGetVersion(self, out):
        out._obj.value = 12080

    def _cuDeviceGet(self, out, index):
        out._obj.value = index

    def _cuDeviceGetAttribute(self, out, attribute, device):
        out._obj.value = {97: 232448, **self.capability}[attribute]

    def _cuDevicePrimaryCtxRetain(self, out, device):
        out._obj.value = 0x7F00_0000_1000 + device.value

    def _cuModuleLoadData(self, out, image):
        assert image.startswith(b"\x7fELF")
        out._obj.value = 0x7F00_0000_2000

    def _cuModuleGetFunction(self, out, module, symbol):
        out._obj.value = 0x7F00_0000_3000 if symbol == b"_ZN1a4fillILi3EEEvPff" else 0

    def _cuFuncGetAttribute(self, out, attribute, function):
        out._obj.value = {1: 48}[attribute]

    def _cuLaunchKernelEx(self, config, function, parameters, extra):
        self.launched.append((config._obj, function.value, list(parameters), extra))

    def _cuTensorMapEncodeTiled(self, at, *arguments):
        ctypes.memset(at, 7, 128)
        plain = [list(x) if isinstance(x, ctypes.Array) else x for x in arguments]
        self.maps.append((at, *plain))


@pytest.fixture
def fake(monkeypatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: made)
    return made


def test_structures_are_those_of_cuda_h():
    """Printed by a C program with CUDA 13.0's cuda.h: sizeof, offsetof."""
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
    function = jit.load(kernel, 0)
    assert jit.load(kernel, 0) is function
    assert (function.handle, function.context) == (0x7F00_0000_3000, 0x7F00_0000_1000)
    assert function.max_shared_bytes == 232448 - 48
    assert jit.load(kernel, 1).context == 0x7F00_0000_1001
    assert fake.calls.count("cuModuleLoadData") == 2
    load = fake.calls.index("cuModuleLoadData")
    around = [x for x in fake.calls[:load] if x.startswith(("cuCtx", "cuThread"))]
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
    fake.capability[75] = capability
    kernel = write_kernel(tmp_path)
    with pytest.raises(error, match=told):
        jit.load(kernel, 0)
    assert fake.calls[-2:].count("cuThreadExchangeStreamCaptureMode") == 1  # all is put back
    assert fake.calls.count("cuCtxPushCurrent_v2") == fake.calls.count("cuCtxPopCurrent_v2") == 1
    assert jit.load(kernel, 0).handle  # and once the cause is gone, it loads


def test_without_a_driver_the_error_says_so(monkeypatch):
    def no_library(name, *arguments, **options):
        raise OSError(f"{name}: cannot open shared object file")

    driver.library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(jit.JitError, match=r"no NVIDIA driver .*libcuda\.so\.1.*install one"):
        driver.library()


def make_launch(tmp_path: Path, *arguments, **options) -> jit.Launch:
    function = jit.load(write_kernel(tmp_path), 0)
    return jit.Launch(function, 132, 384, arguments, stream=0x7F00_DEAD_BEE0, **options)


def test_a_launch_is_one_call(tmp_path, fake):
    pointer, number = ctypes.c_void_p(16), ctypes.c_float(1.5)
    mapped = jit.tensor_map(64, torch.uint8, (64, 8), (64,), (64, 8), 64)
    once = make_launch(
        tmp_path, mapped, pointer, number, shared_bytes=1000, cluster=2, programmatic=True
    )
    fake.calls.clear()
    once()
    once()
    assert fake.calls == ["cuLaunchKernelEx"] * 2
    config, function, parameters, extra = fake.launched[0]
    grid = (config.grid_x, config.grid_y, config.grid_z)
    block = (config.block_x, config.block_y, config.block_z)
    assert (grid, block, config.shared_bytes) == ((132, 1, 1), (384, 1, 1), 1000)
    assert (config.stream, function, extra) == (0x7F00_DEAD_BEE0, 0x7F00_0000_3000, None)
    assert parameters == [mapped.address, ctypes.addressof(pointer), ctypes.addressof(number)]
    attributes = (launch.Attribute * config.num_attributes).from_address(config.attributes)
    found = [(x.id, list(x.value), x.rest) for x in attributes]
    assert found == [(4, [2, 1, 1], b""), (6, [1, 0, 0], b"")]


def test_a_plain_launch_has_no_attributes(tmp_path, fake):
    make_launch(tmp_path)()
    ((config, _, parameters, _),) = fake.launched
    assert (config.num_attributes, config.attributes, parameters) == (0, None, [])


@pytest.mark.parametrize("result", [201, 400])
def test_a_thread_without_the_context_launches_too(tmp_path, fake, result):
    prepared = make_launch(tmp_path)
    fake.calls.clear()
    fake.fails["cuLaunchKernelEx"] = [result]
    prepared()
    push, pop = "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"
    assert fake.calls == ["cuLaunchKernelEx", push, "cuLaunchKernelEx", pop]
    assert len(fake.launched) == 1


@pytest.mark.parametrize("results", [[1], [400, 400]])
def test_a_failed_launch_names_kernel_and_configuration(tmp_path, fake, results):
    prepared = make_launch(tmp_path, cluster=4)
    fake.fails["cuLaunchKernelEx"] = list(results)
    with pytest.raises(jit.JitError, match=r"fill<3> on cuda:0: .*grid=132.*cluster=4.*FAKE"):
        prepared()
    assert fake.launched == []


def test_too_much_shared_memory_is_refused_at_once(tmp_path, fake):
    make_launch(tmp_path, shared_bytes=232400)
    with pytest.raises(jit.JitError, match="shared_bytes must be at most 232400, got 232401"):
        make_launch(tmp_path, shared_bytes=232401)


# Tensor maps

GOOD = {
    "address": 0x7F00_0000_0010,
    "dtype": torch.float8_e4m3fn,
    "shape": (7168, 100),
    "strides_bytes": (7168,),
    "box": (128, 64),
    "swizzle_bytes": 128,
}


def test_a_tensor_map_is_encoded_once(fake):
    made = jit.tensor_map(**GOOD)
    assert jit.tensor_map(**{**GOOD, "shape": [7168, 100], "box": [128, 64]}) is made
    assert made.address % 128 == 0
    assert ctypes.string_at(made.address, 128) == b"\7" * 128
    ((at, *rest),) = fake.maps
    assert at == made.address
    # type, rank, address, shape, strides, box, element strides, then interleave: none, swizzle:
    # 128 B, L2 promotion: 256 B, out of bounds: zeros
    assert rest[:4] == [0, 2, GOOD["address"], [7168, 100]]
    assert rest[4][:1] == [7168]
    assert rest[5:] == [[128, 64], [1, 1], 0, 3, 3, 0]


@pytest.mark.parametrize(
    ("dtype", "number"), [(torch.uint8, 0), (torch.float32, 7), (torch.bfloat16, 9)]
)
def test_data_types_of_tensor_maps(fake, dtype, number):
    jit.tensor_map(16, dtype, (64,), (), (16,), 0)
    assert fake.maps[0][1] == number


@pytest.mark.parametrize(
    ("change", "error", "rule"),
    [
        ({"dtype": torch.int64}, TypeError, "dtype must be one of float8_e4m3fn.* got torch.int64"),
        ({"address": 8}, ValueError, "address must be a multiple of 16 bytes, got 0x8"),
        ({"shape": ()}, ValueError, "1 to 5 dimensions"),
        ({"shape": (7168,)}, ValueError, "strides_bytes one shorter"),
        ({"shape": (7168, 0)}, ValueError, r"sizes must be .* got \[7168, 0\]"),
        ({"strides_bytes": (7100,)}, ValueError, r"multiples of 16 .*pad the rows.* got \[7100\]"),
        ({"box": (128, 257)}, ValueError, r"sides of box must be 1 to 256, got \[128, 257\]"),
        ({"box": (128,)}, ValueError, "box must be as long as shape"),
        ({"box": (24, 64)}, ValueError, "inner side of box must be a multiple of 16 bytes, got 24"),
        ({"box": (144, 64)}, ValueError, "at most swizzle_bytes = 128, got 144 bytes"),
        ({"dtype": torch.bfloat16}, ValueError, "at most swizzle_bytes = 128, got 256 bytes"),
        ({"swizzle_bytes": 96}, ValueError, "swizzle_bytes must be 0, 32, 64 or 128, got 96"),
    ],
)
def test_the_rules_of_the_tma_are_explained(change, error, rule):
    with pytest.raises(error, match=f"^tensor_map: .*{rule}"):
        jit.tensor_map(**{**GOOD, **change})


def test_what_the_driver_refuses_is_shown(fake):
    fake.fails["cuTensorMapEncodeTiled"] = [1]
    with pytest.raises(jit.JitError, match=r"\[7168, 100\].*\[128, 64\].*0x7f0000000010.*FAKE"):
        jit.tensor_map(**GOOD)
