"""A small kernel with headers, to be compiled, and forgetting that it was."""

from pathlib import Path

from moefp8.kernels import jit
from moefp8.kernels.jit import cache, driver, module, tma

SOURCE = """
#include "value.cuh"
namespace a {
template <int N> __global__ void fill(float* p, float x) { p[threadIdx.x] = kValue * N + x; }
}
__global__ void refill() {}
"""


def write_kernel(folder: Path, name: str = "a::fill<3>", source: str = SOURCE) -> jit.Kernel:
    (folder / "value.cuh").write_text('#include "inner.cuh"\n')
    (folder / "inner.cuh").write_text("constexpr float kValue = 2;\n")
    (folder / "fill.cu").write_text(source)
    return jit.Kernel(folder / "fill.cu", name)


def forget() -> None:
    """All that this process has compiled and loaded."""
    for memory in (cache._memory, module._functions, driver._contexts):
        memory.clear()
    tma._encode.cache_clear()
