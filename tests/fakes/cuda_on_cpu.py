"""Run simple kernels of ours on a CPU, thread by thread, as their launchers launch them.

g++ compiles a kernel's own source. Threads are fibers that take turns where they meet; CTAs run one
after the other. What is PTX is replaced, and so is `fp8.cuh` unless its numerics are asked for. A
trap ends its thread alone.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from moefp8.kernels import jit
from moefp8.kernels.jit.source import DEVICE_FOLDER
from tests.fakes.emulator import Emulator

CUDA = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>
#define __device__
#define __global__
#define __host__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(...)

struct Index { unsigned x; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static Index threadIdx, blockIdx, blockDim, gridDim;
alignas(16) static int memory[1 << 16];

template <class A, class B> auto min(A a, B b) { return std::min<std::common_type_t<A, B>>(a, b); }
template <class A, class B> auto max(A a, B b) { return std::max<std::common_type_t<A, B>>(a, b); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __drcp_rn(double x) { return 1 / x; }
inline float __double2float_rn(double x) { return x; }
inline int __double2hiint(double x) { return std::bit_cast<uint64_t>(x) >> 32; }
inline int __double2loint(double x) { return std::bit_cast<uint64_t>(x); }
inline double __hiloint2double(int high, int low) {
  return std::bit_cast<double>(uint64_t(uint32_t(high)) << 32 | uint32_t(low));
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline size_t __cvta_generic_to_shared(const void*) { return 0; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) {
    const int byte = selector >> i * 4 & 7;
    chosen |= uint32_t(bytes >> byte * 8 & 0xff) << i * 8;
  }
  return chosen;
}
inline uint32_t encode(float x) {
  if (std::isnan(x)) return 0x7f;
  const float magnitude = std::min(std::fabs(x), 448.0f);
  const int exponent = std::max(std::ilogb(std::max(magnitude, 1e-30f)), -6);
  const int steps = std::nearbyint(std::ldexp(magnitude, 3 - exponent));  // of the least bit
  return std::signbit(x) << 7 | ((exponent + 6) * 8 + steps);
}
inline uint32_t decode(uint32_t code) {  // as FP16
  const uint32_t magnitude = code & 0x7f;
  const _Float16 scaled = std::bit_cast<_Float16>(uint16_t(magnitude << 7)) * _Float16(256);
  const uint32_t bits = magnitude == 0x7f ? 0x7fff : std::bit_cast<uint16_t>(scaled);
  return bits | (code & 0x80) << 8;
}
inline uint32_t decode_two(uint16_t codes) {
  return decode(codes & 255) | decode(codes >> 8) << 16;
}
// max.NaN.xorsign.abs of numbers that are given by their bits, as are their sign and infinity.
inline uint32_t larger_bits(uint32_t a, uint32_t b, uint32_t sign, uint32_t infinity) {
  const uint32_t magnitude = std::max(a & ~sign & (2 * sign - 1), b & ~sign & (2 * sign - 1));
  return magnitude > infinity ? sign - 1 : magnitude | ((a ^ b) & sign);
}
inline uint32_t larger_halves(uint32_t a, uint32_t b, uint32_t infinity) {
  const uint32_t low = larger_bits(a & 0xffff, b & 0xffff, 0x8000, infinity);
  return low | larger_bits(a >> 16, b >> 16, 0x8000, infinity) << 16;
}
inline uint32_t larger_bf16x2(uint32_t a, uint32_t b) { return larger_halves(a, b, 0x7f80); }
inline uint32_t larger_f16x2(uint32_t a, uint32_t b) { return larger_halves(a, b, 0x7c00); }
inline uint32_t larger_f32(uint32_t a, uint32_t b) {
  return larger_bits(a, b, 0x80000000, 0x7f800000);
}
inline int atomicAdd(int* x, int y) { return (*x += y) - y; }
inline uint32_t atomicAdd(uint32_t* x, uint32_t y) { return (*x += y) - y; }

struct Meeting {
  unsigned size = 0, arrived = 0, round = 0;
  uint32_t values[2][32];
};
static Meeting cta, warps[32];
static ucontext_t scheduler, fibers[1024];
static bool ended[1024];

inline void yield() {
  const Index index = threadIdx;
  swapcontext(&fibers[index.x], &scheduler);
  threadIdx = index;
}
inline uint64_t now() {  // in ns: a microsecond later each time
  static uint64_t ns;
  return ns += 1000;
}
inline void end_round_of(Meeting& meeting) {
  if (meeting.size > 0 && meeting.arrived == meeting.size) meeting.arrived = 0, ++meeting.round;
}
inline void end_thread() {  // the others do not wait for it
  ended[threadIdx.x] = true;
  for (Meeting* meeting : {&cta, &warps[threadIdx.x / 32]}) --meeting->size, end_round_of(*meeting);
  yield();
}
inline const uint32_t* meet(Meeting& meeting, uint32_t value) {
  const unsigned round = meeting.round;
  meeting.values[round % 2][threadIdx.x % 32] = value;
  ++meeting.arrived;
  end_round_of(meeting);
  while (meeting.round == round) yield();
  return meeting.values[round % 2];
}
inline const uint32_t* meet_warp(uint32_t value) { return meet(warps[threadIdx.x / 32], value); }
inline void __syncthreads() { meet(cta, 0); }
inline int __syncthreads_count(bool value) {
  static int counts[2];
  int& count = counts[cta.round % 2];
  if (cta.arrived == 0) count = 0;
  count += value;
  meet(cta, 0);
  return count;
}
inline void __syncwarp() { meet_warp(0); }
inline uint32_t __match_any_sync(uint32_t, uint32_t value) {
  const uint32_t* values = meet_warp(value);
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= uint32_t(values[i] == value) << i;
  return mask;
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
  const uint32_t* values = meet_warp(value);
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= values[i] << i;
  return mask;
}
inline bool __any_sync(uint32_t all, bool value) { return __ballot_sync(all, value) != 0; }
inline int __shfl_sync(uint32_t, uint32_t value, int lane) { return meet_warp(value)[lane]; }
inline uint32_t __shfl_up_sync(uint32_t, uint32_t value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return meet_warp(value)[lane < distance ? lane : lane - distance];
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  const uint32_t* values = meet_warp(value);
  return *std::max_element(values, values + 32);
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  const uint32_t* values = meet_warp(value);
  return *std::min_element(values, values + 32);
}
template <class T> T __shfl_xor_sync(uint32_t, T value, unsigned distance) {
  return std::bit_cast<T>(meet_warp(std::bit_cast<uint32_t>(value))[threadIdx.x % 32 ^ distance]);
}

static const std::function<void()>* body;
static void run_fiber() {
  (*body)();
  ended[threadIdx.x] = true;
  swapcontext(&fibers[threadIdx.x], &scheduler);
}
// Whether no CTA wrote behind its shared memory.
static bool launch(const std::function<void()>& kernel, unsigned grid, unsigned block,
                   unsigned shared_bytes) {
  constexpr size_t kStack = 1 << 15;
  const std::unique_ptr<char[]> stacks(new char[block * kStack]);
  body = &kernel, gridDim = {grid}, blockDim = {block};
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    memset(memory, 0x5a, sizeof(memory));
    cta = {block};
    for (unsigned i = 0; i < block; ++i) {
      warps[i / 32] = {32}, ended[i] = false;
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = &stacks[i * kStack], fibers[i].uc_stack.ss_size = kStack;
      makecontext(&fibers[i], run_fiber, 0);
    }
    for (unsigned left = block; left > 0;) {
      left = 0;
      for (unsigned turn = 0; turn < block; ++turn) {
        const unsigned i = blockIdx.x % 2 ? block - 1 - turn : turn;  // no order is relied on
        if (ended[i]) continue;
        threadIdx = {i};
        swapcontext(&scheduler, &fibers[i]);
        left += !ended[i];
      }
    }
    const int* end = memory + (shared_bytes + 3) / 4;
    if (std::any_of(end, std::cend(memory), [](int x) { return x != 0x5a5a5a5a; })) return false;
  }
  return true;
}
"""
# What `fp8.cuh` does, in the words of C++.
FP8 = r"""
#pragma once
#include "input.cuh"
constexpr uint32_t kInfinity = 0x7f800000, kMagnitude = 0x7fffffff;
struct Divider {
  float divisor, reciprocal;
  float divide(float x) const { return x / divisor; }
};
struct Scale : Divider {
  float scale_inv;
  Scale(uint32_t amax, bool, float min_amax = 1e-4f)
      : scale_inv(std::max(__uint_as_float(amax), min_amax) / 448) {
    divisor = scale_inv, reciprocal = 1 / scale_inv;
  }
};
inline uint32_t encode_e4m3(float a, float b, float c, float d) {
  return encode(a) | encode(b) << 8 | encode(c) << 16 | encode(d) << 24;
}
template <Input kInput>
struct Eight {
  static constexpr int kElementBytes = kInput == Input::kFloat ? 4 : 2;
  uint32_t words[8 * kElementBytes / 4];
  template <bool kVectorized>
  void load(const uint8_t* row, uint32_t column, uint32_t width) {
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t place = kVectorized ? min(column, width - 8) + i : min(column + i, width - 1);
      memcpy(of(i), row + place * kElementBytes, kElementBytes);
    }
  }
  void load_once(const uint8_t* row, uint32_t column) { load<true>(row, column, column + 8); }
  uint8_t* of(int i) const { return (uint8_t*)words + i * kElementBytes; }
  float operator[](int i) const { return load_float<kInput>(of(i)); }
  uint32_t largest() const {
    float amax = 0;
    for (int i = 0; i < 8; ++i) amax = std::max(amax, std::fabs((*this)[i]));
    return std::bit_cast<uint32_t>(amax);
  }
  static uint32_t larger(uint32_t a, uint32_t b) { return std::max(a, b); }
  static uint32_t amax(uint32_t word) { return word; }
  uint2 e4m3(const Divider& scale) const {
    uint32_t codes[2] = {};
    for (int i = 0; i < 8; ++i) codes[i / 4] |= encode(scale.divide((*this)[i])) << i % 4 * 8;
    return {codes[0], codes[1]};
  }
  template <bool kVectorized>
  static void store(uint8_t* row, uint32_t column, uint32_t width, uint2 codes) {
    for (uint32_t i = 0; i < (kVectorized ? 8 : min(8, width - column)); ++i) {
      row[column + i] = (i < 4 ? codes.x : codes.y) >> i % 4 * 8;
    }
  }
};
"""
PTX = {  # what is replaced, and by what
    r'asm volatile\("griddepcontrol[^;]*;[^;]*;': "",
    r'asm\("cvt.f32.f16[^;]*;[^;]*;': "x = std::bit_cast<_Float16>(uint16_t(low_bits));",
    r'asm\("cvt.rn.f16.f32[^;]*;[^;]*;': "bits = std::bit_cast<uint16_t>(_Float16(x));",
    r'asm\("ex2.approx[^:]*: "=f"\((\w+)\) : "f"\((.*)\)\);': r"\1 = std::exp2(\2);",
    r'asm\("rcp.approx[^:]*: "=f"\((\w+)\) : "f"\((.*)\)\);': r"\1 = 1 / (\2);",
    r'asm volatile\("cp.async.(commit|wait)[^;]*;[^;]*;': "",
    r'asm volatile\(\s*"\{[^"]*"\s*"cp.async.c[ag][^,]*, \[%1\], (\d+)[^"]*"[^;]*;': (
        r"if (exists) memcpy(target, source, \1); else memset(target, 0, \1);"
    ),
    r'asm volatile\("" : "\+f"\(\w+\)\);': "",
    r'asm\("min.NaN.f32[^:]*: "=f"\((\w+)\) : "f"\((\w+)\), "f"\((.*)\)\);': (
        r"\1 = \2 <= \3 || std::isnan(\2) ? \2 : \3;"
    ),
    r'asm\("max.NaN.f32[^:]*: "=f"\((\w+)\) : "f"\((\w+)\), "f"\((.*)\)\);': (
        r"\1 = \2 >= \3 || std::isnan(\2) ? \2 : \3;"
    ),
    r'asm\("max.NaN.xorsign.abs.(\w+) %0[^:]*: "=r"\((\w+)\) : "r"\((\w+)\), "r"\((\w+)\)\);': (
        r"\2 = larger_\1(\3, \4);"
    ),
    r'asm\("\{\\n.reg .b16 low, [^:]*cvt.rn.satfinite.e4m3x2[^:]*: "=r"\((\w+)\)[^;]*;': (
        r"\1 = encode(a) | encode(b) << 8 | encode(c) << 16 | encode(d) << 24;"
    ),
    r'asm\("cvt.rn.f16x2.e4m3x2[^:]*: "=r"\((\w+)\) : "h"\((.*)\)\);': r"\1 = decode_two(\2);",
    r'asm volatile\("fence.acq_rel.sys;[^;]*;': "",
    r'asm volatile\("st.release.sys[^;]*;[^;]*;': "*(volatile uint64_t*)word = value;",
    r'asm volatile\("ld.(acquire|relaxed).sys[^;]*;[^;]*;': "value = *(volatile uint64_t*)word;",
    r'asm volatile\("nanosleep[^;]*;[^;]*;': "",
    r'asm volatile\("mov.u64 %0, %%globaltimer;[^;]*;': "ns = now();",
    r'asm volatile\("trap;"\);': "end_thread();",
    r"(?<!extern )__shared__": "static",
}
MATRIX = r"""
#pragma once
inline uint32_t pack_bf16(float low, float high) {
  const auto round = [](float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  return round(low) | round(high) << 16;
}
"""


def build(
    kernels: list[jit.Kernel],
    folder: Path,
    *,
    with_numerics: bool = False,
    more: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Callable[..., bool]]:
    """The kernels of one source as functions of (arguments, grid, block, shared_bytes), by name.

    with_numerics: `fp8.cuh` itself is compiled, in which reciprocals are exact.
    more: C++ of further functions by name, `extern "C"`, which may call what the source has.
    """
    (source,) = {kernel.source for kernel in kernels}
    files = {}
    for path in (source, *source.parent.glob("*.cuh"), *DEVICE_FOLDER.glob("*.cuh")):
        text = path.read_text()
        for pattern, instead in PTX.items():
            text = re.sub(pattern, instead, text)
        files[path.name] = text
    if not with_numerics:
        files["fp8.cuh"] = FP8
    files["matrix.cuh"] = MATRIX
    runs = "\n".join(
        f'extern "C" bool run{i}(const Arguments* args, unsigned grid, unsigned block, unsigned '
        f"bytes) {{ return launch([&] {{ {kernel.name}(*args); }}, grid, block, bytes); }}"
        for i, kernel in enumerate(kernels)
    )
    others = "\n".join(more.values())
    files["main.cpp"] = f'{CUDA}\n#include "{source.name}"\n{runs}\n{others}'
    library = folder / f"{source.stem}.so"
    library.write_bytes(_library_of(tuple(files.items())))
    loaded = ctypes.CDLL(str(library))
    functions = {}
    for i, kernel in enumerate(kernels):
        functions[kernel.name] = getattr(loaded, f"run{i}")
        functions[kernel.name].restype = ctypes.c_bool
    return functions | {name: getattr(loaded, name) for name in more}


@lru_cache(maxsize=16)
def _library_of(files: tuple[tuple[str, str], ...]) -> bytes:
    """What g++ makes of main.cpp among these files: of the same ones once, since it takes seconds.

    Without unique symbols, copies of a library have memory of their own.
    """
    options = [
        "-std=c++20",
        "-O1",
        "-w",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-fno-gnu-unique",
    ]
    with TemporaryDirectory() as folder:
        for name, text in files:
            (Path(folder) / name).write_text(text)
        subprocess.run(["g++", *options, "main.cpp", "-o", "made.so"], cwd=folder, check=True)
        return (Path(folder) / "made.so").read_bytes()


def is_possible() -> bool:
    return shutil.which("g++") is not None


class OnCpu(Emulator):
    """A library for `FakeDriver` that launches functions of `build`."""

    def __init__(self, functions: dict[str, Callable[..., bool]]) -> None:
        super().__init__()
        self.functions = functions

    def compute(self, made, parameters):
        assert made.block % 32 == 0
        assert 32 <= made.block <= 1024
        run, arguments = self.functions[made.kernel.name], ctypes.c_void_p(parameters[0])
        is_within = run(arguments, made.grid, made.block, made.shared_bytes)
        assert is_within, "writes behind shared memory"
