// Integers, addresses, warps and clusters: what every kernel starts from. It includes no header of ours.
#pragma once

#ifdef __CUDACC_RTC__  // NVRTC has no <stdint.h>
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;
#else
#include <stdint.h>
#endif

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;

template <bool kFirst, class A, class B>
struct Select {  // std::conditional
  using Type = A;
};
template <class A, class B>
struct Select<false, A, B> {
  using Type = B;
};

__host__ __device__ constexpr int ceil_div(int x, int y) { return (x + y - 1) / y; }

// A generic pointer into shared memory as the 32-bit address that PTX takes.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns the value of lane 0, so that the compiler knows it to be the same in the whole warp.
__device__ inline int warp_uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// True in one lane of a converged warp.
__device__ inline bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}

// Waits for the `kThreads` threads that use the named barrier `id`; __syncthreads uses 0.
template <int kThreads>
__device__ inline void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Moves registers between warpgroups; the whole warpgroup calls it.
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Clusters ----

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The two halves of a barrier for all threads of all CTAs of the cluster. The arrival releases no
// writes: that would be a fence of the whole GPU, about a microsecond.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Orders this thread's reads and writes before its later ones, for the threads of its CTA.
__device__ inline void fence_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// The same shared-memory address in the CTA `rank` of the cluster.
__device__ inline uint32_t address_in_cluster(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// ---- Programmatic dependent launch ----

// Waits until the kernel before this one is complete and its writes are visible.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start its prologue. This comes after `wait_for_previous_kernel`, because the
// next kernel may read, before its own wait, what is older than this kernel (its weights).
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
