// Hints to the L2 cache: what leaves it first.
#pragma once
#include "base.cuh"

// Loads without a policy do as with evict_unchanged. evict_normal is another one; with it dense GEMMs on an H200 took
// up to 1.7 times as long.
struct L2Policy {
  uint64_t bits;

  static __device__ L2Policy usual() {
    L2Policy policy;
    asm("createpolicy.fractional.L2::evict_unchanged.b64 %0;" : "=l"(policy.bits));
    return policy;
  }
  static __device__ L2Policy read_once() {
    L2Policy policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy.bits));
    return policy;
  }
};

// Loads 16 bytes, at a multiple of 16, that no other SM reads after this.
__device__ inline uint4 load_once(const uint8_t* address) {
  uint4 v;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address), "l"(L2Policy::read_once().bits));
  return v;
}
