// A warp on the CPU: enough of CUDA to run the text of a kernel with g++, one warp at a time.
//
// Lanes are contexts that take turns. A lane runs until all have to meet; when its turn comes again,
// all others have been there.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#define asm(...)
#define volatile(...) ("")  // what `asm volatile(...)` becomes is an empty one
#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct Index {
  uint32_t x;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static Index threadIdx, blockIdx, blockDim;

static ucontext_t main_context, lane_contexts[32];
static uint32_t told[2][32];  // what each lane tells, at even and at odd meetings
static int meetings[32];
static bool is_done[32];

static const uint32_t* meet(uint32_t value) {
  const int lane = threadIdx.x % 32, parity = meetings[lane]++ % 2;
  told[parity][lane] = value;
  swapcontext(&lane_contexts[lane], &main_context);
  return told[parity];
}

template <class Body>
static void run_warp(uint32_t warp, Body body) {
  static char stacks[32][1 << 16];
  static Body* current;
  current = &body;
  void (*entry)() = [] {
    (*current)();
    is_done[threadIdx.x % 32] = true;
  };
  for (int lane = 0; lane < 32; ++lane) {
    getcontext(&lane_contexts[lane]);
    lane_contexts[lane].uc_stack.ss_sp = stacks[lane];
    lane_contexts[lane].uc_stack.ss_size = sizeof(stacks[lane]);
    lane_contexts[lane].uc_link = &main_context;
    makecontext(&lane_contexts[lane], entry, 0);
    is_done[lane] = false, meetings[lane] = 0;
  }
  for (int running = 32; running > 0;) {
    for (int lane = 0; lane < 32; ++lane) {
      if (is_done[lane]) continue;
      threadIdx.x = warp * 32 + lane;
      swapcontext(&main_context, &lane_contexts[lane]);
      running -= is_done[lane];
    }
  }
}

template <class T>
static T min(T x, T y) {
  return x < y ? x : y;
}
template <class T>
static T max(T x, T y) {
  return x < y ? y : x;
}

static void __syncwarp() { meet(0); }
static void __syncthreads() {}  // warps run one after the other
static uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  const uint32_t* all = meet(value);
  for (int lane = 0; lane < 32; ++lane) value = max(value, all[lane]);
  return value;
}
static uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  const uint32_t* all = meet(value);
  for (int lane = 0; lane < 32; ++lane) value = min(value, all[lane]);
  return value;
}
static uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
static float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
static uint32_t __shfl_xor_sync(uint32_t, uint32_t value, uint32_t distance) {
  return meet(value)[threadIdx.x % 32 ^ distance];
}
static float __shfl_xor_sync(uint32_t all, float value, uint32_t distance) {
  return __uint_as_float(__shfl_xor_sync(all, __float_as_uint(value), distance));
}
static int __shfl_sync(uint32_t, int value, int lane) { return meet(value)[lane]; }
static uint64_t __cvta_generic_to_shared(const void*) { return 0; }

// -ffp-contract=off: none of these is contracted to an FMA.
static float __fadd_rn(float x, float y) { return x + y; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fdiv_rn(float x, float y) { return x / y; }
static double __dadd_rn(double x, double y) { return x + y; }
static double __dmul_rn(double x, double y) { return x * y; }
static double __drcp_rn(double x) { return 1 / x; }
static float __double2float_rn(double x) { return x; }
static int __double2hiint(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  return bits >> 32;
}
static int __double2loint(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  return bits;
}
static double __hiloint2double(int high, int low) {
  const uint64_t bits = static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
  double x;
  memcpy(&x, &bits, 8);
  return x;
}
