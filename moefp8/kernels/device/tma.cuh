// TMA: boxes of 2-D and 3-D tensors between global and shared memory.
#pragma once
#include "base.cuh"
#include "l2.cuh"
#include "mbarrier.cuh"

// What the host encoded with cuTensorMapEncodeTiled; a kernel takes it as `const __grid_constant__`.
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

// The whole warp calls these loads, and its `elected` lane issues them. A branch around them would
// do the same, but the compiler keeps addresses in uniform registers only where no lane may be missing.

// Where a box begins, x innermost; a map of two dimensions has no z.
struct Corner {
  int x, y, z;
};

// Loads a box; what is out of bounds reads as zero. 2-D loads ignore the policy.
template <int kDimensions>
__device__ inline void tma_load(bool elected, void* destination, const TensorMap& map, Barrier& full, Corner at,
                                L2Policy policy) {
  if constexpr (kDimensions == 2) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "@p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];\n"
        "}" ::"r"(shared_address(destination)),
        "l"(&map), "r"(full.address()), "r"(at.x), "r"(at.y), "r"(static_cast<int>(elected))
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %7, 0;\n"
        "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;\n}" ::"r"(shared_address(destination)),
        "l"(&map), "r"(full.address()), "r"(at.x), "r"(at.y), "r"(at.z), "l"(policy.bits),
        "r"(static_cast<int>(elected))
        : "memory");
  }
}

// Fetches a box of a 3-D map into the L2 cache.
__device__ inline void tma_prefetch(bool elected, const TensorMap& map, Corner at) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "@p cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];\n}" ::"l"(&map),
      "r"(at.x), "r"(at.y), "r"(at.z), "r"(static_cast<int>(elected))
      : "memory");
}

// Loads a box of a 3-D map into every CTA of the cluster whose bit is set in `ranks`, at the same address there.
__device__ inline void tma_load_multicast(bool elected, void* destination, const TensorMap& map, Barrier& full,
                                          Corner at, uint16_t ranks) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %7, 0;\n"
      "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;\n}" ::"r"(shared_address(destination)),
      "l"(&map), "r"(full.address()), "r"(at.x), "r"(at.y), "r"(at.z), "h"(ranks), "r"(static_cast<int>(elected))
      : "memory");
}

// Makes what this thread wrote to shared memory visible to TMA and WGMMA; a barrier follows.
__device__ inline void fence_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores a box; what is out of bounds is not written.
template <int kDimensions>
__device__ inline void tma_store(const TensorMap& map, const void* source, Corner at) {
  if constexpr (kDimensions == 2) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(shared_address(source)), "r"(at.x), "r"(at.y)
                 : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(shared_address(source)), "r"(at.x), "r"(at.y), "r"(at.z)
                 : "memory");
  }
}

__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Adds a box to what a 3-D map's tensor holds; what is out of bounds is not written.
__device__ inline void tma_add(const TensorMap& map, const void* source, Corner at) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared_address(source)), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}

// Waits until all committed stores of this thread but the last kPending have read their shared memory.
template <int kPending = 0>
__device__ inline void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
