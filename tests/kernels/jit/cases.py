"""A small kernel with headers and a made-up one, processes that want them, calls that fail."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import moefp8
from moefp8.kernels import jit
from moefp8.kernels.jit import cache
from tests.gpu import ARCH

SOURCE = """
#include "value.cuh"
namespace a {
template <int N> __global__ void fill(float* p, float x) { p[threadIdx.x] = kValue * N + x; }
}
__global__ void refill() {}
"""
CUBIN = jit.Cubin(b"image" * 1000, "symbol", "log")  # made up: no GPU would load it
ENTRY = CUBIN.to_bytes("key")
STRANGER = 4711  # a user who is nobody here
PATIENCE_S = 300  # only what hangs takes as long, however busy the machine is


def write_kernel(folder: Path, name: str = "a::fill<3>", source: str = SOURCE) -> jit.Kernel:
    (folder / "value.cuh").write_text('#include "inner.cuh"\n')
    (folder / "inner.cuh").write_text("constexpr float kValue = 2;\n")
    (folder / "fill.cu").write_text(source)
    return jit.Kernel(folder / "fill.cu", name)


def symbol_of(number: int) -> str:
    """The symbol of `a::fill<number>`."""
    return f"_ZN1a4fillILi{number}EEEvPff"


def symbols_of(kernels: Sequence[jit.Kernel]) -> list[str]:
    """Compile in another process, which can import this module."""
    return [jit.compile_kernel(kernel, ARCH).symbol for kernel in kernels]


def forget() -> None:
    """Forget all that this process has compiled."""
    cache._memory.clear()


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def only_entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    assert path.suffix == ".cubin"
    return path


def fail(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    code: int,
    when: Callable[..., bool] = lambda *_: True,
) -> list[tuple]:
    """Let calls of `owner.name` fail with errno `code` if `when` says so; return these calls."""
    real, failed = getattr(owner, name), []

    def call(*arguments, **options):
        if not when(*arguments):
            return real(*arguments, **options)
        failed.append(arguments)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(owner, name, call)
    return failed


# The JIT room works without torch, which its package and those around it import. `get(key)` takes a
# made-up kernel from the cache, and `fill(numbers)` gives the symbols of kernels of the source in
# argv[2]; both tell what is built because it is not there. What hangs is ended after minutes.
_BEGIN = """
import os, pathlib, signal, sys, threading, time, types
signal.alarm(300)
for name in ("moefp8", "moefp8.kernels", "moefp8.kernels.jit"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [os.path.join(sys.argv[1], *name.split(".")[1:])]
from moefp8.kernels.jit import cache, cubin, kernel
from moefp8.system.threads import Once
def tell(line):
    os.write(1, f"{line}\\n".encode())  # whole, whichever threads and children write too
def build():
    tell("built")
    return cubin.Cubin(b"image" * 1000, "symbol", "log")
def get(key):
    return cache.cached(key, build).symbol
quietly = kernel.Nvrtc.compile
def compile_and_tell(self, program, options):
    tell(f"compiled {program.expression}")
    return quietly(self, program, options)
kernel.Nvrtc.compile = compile_and_tell
def fill(*numbers):
    source = pathlib.Path(sys.argv[2])
    kernels = [kernel.Kernel(source, f"a::fill<{i}>") for i in numbers]
    return [cubin.symbol for cubin in kernel.compile_kernels(kernels, "sm_90a", num_threads=2)]
def exit_code_of_child(function):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(function())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def start_python(
    code: str, *arguments: object, within: Sequence[str] = (), stdin: int | None = None
) -> "subprocess.Popen[str]":
    """Run code behind `_BEGIN` in a new process, whose errors go to its output.

    within: a command that runs a command.
    """
    code = f"{_BEGIN}{code}\nassert 'torch' not in sys.modules"
    ignoring = ("-W", "ignore::DeprecationWarning")  # Python dislikes forks amid threads
    command = [*within, sys.executable, *ignoring, "-c", code]
    command += [str(Path(moefp8.__file__).parent), *map(str, arguments)]
    out, err = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, text=True, stdin=stdin, stdout=out, stderr=err)


def output_of(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=PATIENCE_S)[0]


def run_python(code: str, *arguments: object, within: Sequence[str] = ()) -> str:
    return output_of(start_python(code, *arguments, within=within))
