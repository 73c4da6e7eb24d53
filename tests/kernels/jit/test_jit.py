"""The JIT room: compiling with the real NVRTC, and the cache while all goes well."""

import shutil
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import cuda.pathfinder
import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.jit import cache, kernel
from moefp8.system.threads import Once
from tests.gpu import ARCH
from tests.kernels.jit.cases import SOURCE, forget, only_entry, symbol_of, write_kernel

pytestmark = pytest.mark.usefixtures("fresh_jit")


# Compiling


def test_a_kernel_becomes_a_cubin(tmp_path):
    cubin = jit.compile_kernel(write_kernel(tmp_path), ARCH)
    assert cubin.image.startswith(b"\x7fELF")
    assert cubin.symbol == symbol_of(3)
    assert cubin.symbol.encode() in cubin.image
    assert "Used" in cubin.log  # registers
    assert cubin.problems() == []


def test_several_at_once_keep_their_order(tmp_path, compiles):
    names = [f"a::fill<{i}>" for i in range(4)]
    kernels = [write_kernel(tmp_path, name) for name in names]
    cubins = jit.compile_kernels([*kernels, kernels[0]], ARCH, num_threads=2)
    assert [cubin.symbol for cubin in cubins] == [symbol_of(i) for i in (0, 1, 2, 3, 0)]
    assert sorted(compiles) == names
    assert jit.compile_kernels([], ARCH) == []


def test_a_compile_error_shows_kernel_options_and_log(tmp_path):
    broken = write_kernel(tmp_path, "a::fill<1>", SOURCE.replace("kValue *", "no_such_name *"))
    with pytest.raises(jit.JitError) as caught:
        jit.compile_kernel(broken, ARCH)
    for part in (
        "fill.cu: a::fill<1>",
        str(broken.source),
        *kernel.options_for(ARCH),
        "no_such_name",
    ):
        assert part in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["a::nothing<3>", "a::fill<", "a::fill<void>"])
def test_a_wrong_name_is_a_compile_error(tmp_path, name):
    with pytest.raises(jit.JitError, match=r"fill\.cu: a::.* does not compile"):
        jit.compile_kernel(write_kernel(tmp_path, name), ARCH)


@pytest.mark.parametrize("name", ["nowhere.cuh", "../outside.cuh"])
def test_an_include_comes_from_beside_or_from_device(tmp_path, name):
    (tmp_path / "outside.cuh").touch()
    (tmp_path / "in").mkdir()
    kernel = write_kernel(tmp_path / "in", source=f'  #  include "{name}"\n')
    with pytest.raises(jit.JitError, match=f"{name}.*not found in .*device"):
        jit.compile_kernel(kernel, ARCH)


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(jit.JitError, match=r"none\.cu cannot be read"):
        jit.compile_kernel(jit.Kernel(tmp_path / "none.cu", "k"), ARCH)


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
        cubin = jit.compile_kernel(write_kernel(tmp_path, name, source), ARCH)
    assert any(problem in line for line in cubin.problems()), cubin.log


def test_the_log_scan_sees_an_ignored_setmaxnreg():
    log = "ptxas info : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to allow debugging"
    assert jit.Cubin(b"", "", f"fine\n  {log}\n").problems() == [log]


def test_without_nvrtc_the_error_says_what_to_install(tmp_path, monkeypatch):
    def find(name):
        raise cuda.pathfinder.DynamicLibNotFoundError("not on this machine")

    monkeypatch.setattr(torch.version, "cuda", None)  # else that of torch is found, which has one
    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", find)
    monkeypatch.setattr(kernel, "_started", Once())
    with pytest.raises(jit.JitError, match=r"pip install nvidia-cuda-nvrtc(.|\n)*not on this mach"):
        jit.compile_kernel(write_kernel(tmp_path), ARCH)


# Pretends that torch was built for other CUDAs, for which there is a library in that folder; each
# is looked for by a process that has loaded none.
OTHER_CUDAS = """
import os, sys, torch
_, folder, *majors = sys.argv
sys.path.insert(0, folder)
from moefp8.kernels.jit.nvrtc import Nvrtc
for major in majors:
    torch.version.cuda = major and f"{major}.8"
    if os.fork() == 0:
        print(Nvrtc().path, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.parametrize("package", ["cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13"])
def test_nvrtc_is_of_the_cuda_of_torch(tmp_path, package):
    if (installed := find_spec("nvidia")) and installed.origin:
        pytest.skip("the installed nvidia is one folder, beside which no other is seen")
    real, path = kernel._compiler().path, tmp_path / "nvidia" / package
    path.parent.mkdir(parents=True)
    path.symlink_to(real)
    majors = package[-2:], ""  # "": torch has no CUDA
    command = [sys.executable, "-c", OTHER_CUDAS, str(tmp_path), *majors]
    assert subprocess.check_output(command, text=True) == f"{path}\n{real}\n"


def test_the_version_tells_builds_apart():
    assert kernel._compiler().version.startswith("nvrtc CL-")


# nvcc


def test_an_unknown_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFP8_COMPILER", "gcc")
    with pytest.raises(jit.JitError, match="must be nvrtc or nvcc, got 'gcc'"):
        jit.compile_kernel(write_kernel(tmp_path), ARCH)


def compile_by_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFP8_COMPILER", "nvcc")
    monkeypatch.setattr(kernel, "_started", Once())


def test_without_nvcc_the_error_says_where_it_is_looked_for(tmp_path, monkeypatch):
    compile_by_nvcc(monkeypatch)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(jit.JitError, match=r"no nvcc is in \$CUDA_HOME/bin or PATH"):
        jit.compile_kernel(write_kernel(tmp_path), ARCH)


def test_nvcc_s_kernel_is_found_in_its_elf_file(tmp_path, monkeypatch):
    """nvcc is a script that hands out what NVRTC made of the same source, `refill` included."""
    (tmp_path / "bin").mkdir()
    image, nvcc = tmp_path / "image", tmp_path / "bin" / "nvcc"
    by_nvrtc = jit.compile_kernel(write_kernel(tmp_path), ARCH)
    compile_by_nvcc(monkeypatch)
    image.write_bytes(by_nvrtc.image)
    nvcc.write_text(f"""#!/bin/sh
test "$1" = --version && echo V1.2.3 && exit
while [ "$1" != -o ]; do shift; done
cat "$3" && test -e "$(dirname "$3")/inner.cuh" && cp {image} "$2"
""")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    cubin = jit.compile_kernel(write_kernel(tmp_path), ARCH)
    assert (cubin.image, cubin.symbol) == (by_nvrtc.image, by_nvrtc.symbol)
    assert "(a::fill<3>)" in cubin.log
    with pytest.raises(jit.JitError, match="one kernel ill"):
        jit.compile_kernel(write_kernel(tmp_path, "a::ill<3>"), ARCH)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on PATH")
def test_a_real_nvcc_agrees_on_the_symbol(tmp_path, monkeypatch):
    compile_by_nvcc(monkeypatch)
    cubin = jit.compile_kernel(write_kernel(tmp_path), ARCH)
    assert cubin.symbol == symbol_of(3)
    assert "Used" in cubin.log


# The cache


def test_the_second_process_finds_it_on_disk(tmp_path, compiles):
    kernel = write_kernel(tmp_path)
    first = jit.compile_kernel(kernel, ARCH)
    assert jit.compile_kernel(kernel, ARCH) is first
    forget()
    assert jit.compile_kernel(kernel, ARCH) == first
    assert len(compiles) == 1
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["fill.cu", "value.cuh", "inner.cuh"])
def test_a_change_of_any_file_compiles_anew(tmp_path, compiles, name):
    kernel = write_kernel(tmp_path)
    jit.compile_kernel(kernel, ARCH)
    with open(tmp_path / name, "a") as file:
        file.write("// changed\n")
    jit.compile_kernel(kernel, ARCH)
    assert len(compiles) == 2


def test_the_place_of_the_source_does_not_matter(tmp_path, compiles):
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        jit.compile_kernel(write_kernel(folder), ARCH)
    assert len(compiles) == 1


def test_whoever_compiles_publishes_the_same_bytes(tmp_path, folder):
    published = []
    for _ in range(2):
        forget()
        jit.compile_kernel(write_kernel(tmp_path), ARCH)
        published.append(only_entry(folder).read_bytes())
        only_entry(folder).unlink()
    assert published[0] == published[1]
    assert b"registers" in published[0]
    assert b"ompile time" not in published[0]


def test_another_compiler_compiles_anew(tmp_path, compiles, monkeypatch):
    jit.compile_kernel(write_kernel(tmp_path), ARCH)
    monkeypatch.setattr(kernel._compiler(), "version", "nvrtc of tomorrow")
    jit.compile_kernel(write_kernel(tmp_path), ARCH)
    assert len(compiles) == 2


def test_the_folder_is_the_user_s_cache_folder(monkeypatch):
    monkeypatch.delenv("MOEFP8_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache.cache_folder() == Path("/some/cache/moefp8")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "moefp8"


def test_importing_opens_no_library_and_no_folder(tmp_path):
    code = """
import torch
def opened():
    return {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
before = opened()
import moefp8.kernels.jit
print([name for name in opened() - before if "nvrtc" in name or "libcuda" in name])
"""
    assert subprocess.check_output([sys.executable, "-c", code]) == b"[]\n"
    assert not (tmp_path / "cache").exists()
