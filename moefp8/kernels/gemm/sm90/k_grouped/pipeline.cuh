// The pipeline of a CTA: what shared memory holds, where a math thread stands, and how a stage is handed back.
//
// A stage holds a block of tokens: codes of both operands, and their scales. `full` tells the math that it was loaded,
// `empty` tells the producer that it was read.
#pragma once
#include "config.cuh"
#include "mbarrier.cuh"

template <KGroupedConfig C, bool kNeeded = C.stages_output>
struct Staging {
  alignas(1024) uint8_t boxes[C.warpgroups][C.output_buffers][C.output_boxes][64 * 128];
};
template <KGroupedConfig C>
struct Staging<C, false> {};

template <KGroupedConfig C>
struct Shared {
  // 1024 B: required by the 128 B swizzle.
  alignas(1024) uint8_t rows[C.stages][C.tile_m * kBlock];
  alignas(1024) uint8_t cols[C.stages][C.tile_n * kBlock];
  [[no_unique_address]] Staging<C> output;
  struct alignas(128) {  // 128 B: required by TMA
    float rows[C.tile_m];
    alignas(128) float cols[C.scales_b];
  } scales[C.stages];
  alignas(8) Barrier full[C.stages];
  Barrier empty[C.stages];
};

// Where a math thread stands: its fragments of a 64-row WGMMA lie in rows row and row + 8, and in columns col and
// col + 1 of 8.
template <KGroupedConfig C>
struct Thread {
  const int group = warp_uniform(threadIdx.x / kWarpgroup), lane = threadIdx.x % kWarp;
  const int row = group * 64 * C.parts + threadIdx.x % kWarpgroup / kWarp * 16 + lane / 4, col = lane % 4 * 2;
};

// The producers of both CTAs may fill the stage again. The fence is there because the arrival would overtake reads.
template <KGroupedConfig C>
__device__ void release(Shared<C>& shared, int stage) {
  fence_cta();
  shared.empty[stage].arrive();
  if constexpr (C.multicast > 1) {
    if (threadIdx.x % kWarp == 0) shared.empty[stage].arrive_in_cluster(cluster_rank() ^ 1);
  }
}
