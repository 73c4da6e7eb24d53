"""A small kernel with headers, to be compiled, here or by other processes, and forgotten."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moefp8.kernels import jit
from moefp8.kernels.jit import cache

SOURCE = """
#include "value.cuh"
namespace a {
template <int N> __global__ void fill(float* p, float x) { p[threadIdx.x] = kValue * N + x; }
}
__global__ void refill() {}
"""


CUBIN = jit.Cubin(b"image" * 1000, "symbol", "log")  # made up: no GPU would load it
# In another process, of kernels of SOURCE: every compilation is told.
COMPILE = """
import pathlib, time
from room.kernel import Kernel, _compiler, compile_kernels
from room.nvrtc import Nvrtc
quietly = Nvrtc.compile
def compile_and_tell(self, program, options):
    tell(f"compiled {program.expression}")
    return quietly(self, program, options)
Nvrtc.compile = compile_and_tell
def kernels(*numbers):
    return [Kernel(pathlib.Path(SOURCE), f"a::fill<{i}>") for i in numbers]
"""


def write_kernel(folder: Path, name: str = "a::fill<3>", source: str = SOURCE) -> jit.Kernel:
    (folder / "value.cuh").write_text('#include "inner.cuh"\n')
    (folder / "inner.cuh").write_text("constexpr float kValue = 2;\n")
    (folder / "fill.cu").write_text(source)
    return jit.Kernel(folder / "fill.cu", name)


def forget() -> None:
    """All that this process has compiled."""
    cache._memory.clear()


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# `get(key)` takes a made-up kernel from the cache; one that is not there is built, and told.
GET = """
from room.cache import cached
from room.cubin import Cubin
def build():
    tell("built")
    return Cubin(b"image" * 1000, "symbol", "log")
def get(key):
    return cached(key, build).symbol
"""


def python_without_torch(
    code: str, within: Sequence[str] = (), **options: object
) -> "subprocess.Popen[str]":
    """Runs code in a new process in which `room` is the JIT room; what compiles needs no torch.

    `tell(line)` writes to its output, which errors go to as well.
    within: a command that runs a command; options: of Popen. A hang ends in an error.
    """
    code = f"""
import os, signal, sys, types
signal.alarm(60)
def tell(line):
    os.write(1, f"{{line}}\\n".encode())  # whole, whichever threads and children write too
room = types.ModuleType("room")
room.__path__ = [{str(Path(jit.__file__).parent)!r}]
sys.modules["room"] = room
{code}
assert "torch" not in sys.modules
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [*within, sys.executable, "-c", code]
    return subprocess.Popen(command, text=True, **{**pipes, **options})


def output_of(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=60)[0]


def symbols_of(kernels: Sequence[jit.Kernel]) -> list[str]:
    """For another process: a module that it can import."""
    return [jit.compile_kernel(kernel).symbol for kernel in kernels]
