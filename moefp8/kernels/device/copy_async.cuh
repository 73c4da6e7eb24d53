// Copies from global to shared memory that pass no register, by the threads that want them.
#pragma once
#include "base.cuh"

// Copies kBytes, or makes them zeros, and then reads nothing. Both addresses are multiples of kBytes.
template <int kBytes>
__device__ inline void copy_async(void* target, const uint8_t* source, bool exists) {
  static_assert(kBytes == 8 || kBytes == 16, "what is copied at once");
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n.reg .pred missing;\nsetp.eq.u32 missing, %2, 0;\n"
        "cp.async.cg.shared.global [%0], [%1], 16, missing;\n}" ::"r"(shared_address(target)),
        "l"(source), "r"(uint32_t(exists))
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred missing;\nsetp.eq.u32 missing, %2, 0;\n"
        "cp.async.ca.shared.global [%0], [%1], 8, missing;\n}" ::"r"(shared_address(target)),
        "l"(source), "r"(uint32_t(exists))
        : "memory");
  }
}

// What the thread has copied since the last call becomes a group.
__device__ inline void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of the thread but the last kLeft, for this thread alone.
template <int kLeft>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
