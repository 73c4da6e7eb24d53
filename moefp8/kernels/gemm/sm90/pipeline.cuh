// The pipeline of a CTA: what shared memory holds, and how a stage is handed back.
//
// A stage holds k_blocks_per_stage k-blocks of both operands and their scales. `full` tells the consumers that it was
// loaded, `empty` tells the producers that it was read. See docs/hopper-fp8-gemm.md for a picture.
#pragma once
#include "schedule.cuh"

// Where the other CTAs that divided K put their sums of this one's slice.
template <GemmConfig C, bool kNeeded = (C.split_k > 1)>
struct Inbox {
  float4 inbox[(C.split_k - 1) * C.store_n / 8][C.math_warpgroups * kWarpgroup];
};
template <GemmConfig C>
struct Inbox<C, false> {};

// The tokens of a tile that are WGMMA's columns: with swap_ab all of them, else the tail.
template <GemmConfig C>
struct Columns {
  static constexpr int kFirstWarpgroup = C.tail > 0 ? C.row_warpgroups : 0;
  static constexpr int kFirst = C.tail > 0 ? C.wgmma_m : 0, kSize = C.tail > 0 ? C.tail : C.wgmma_n;
};

// The largest magnitude of a token's outputs decides its scale. Where they are spread over warps or CTAs, they meet
// here. There is room for what the peer delivers of two tiles, in turn.
template <GemmConfig C, bool kNeeded = C.shares_scale_with_peer && !C.stacked>
struct RowMagnitudes {
  alignas(16) uint32_t of_peer[2][C.wgmma_m];
};
template <GemmConfig C>
struct RowMagnitudes<C, false> {};
template <GemmConfig C, bool kNeeded = C.stacked || (C.gate_up && C.tail > 0)>
struct ColumnMagnitudes {
  alignas(16) uint32_t of_warps[2][kBlock / 16][Columns<C>::kSize];  // 16 outputs each
};
template <GemmConfig C>
struct ColumnMagnitudes<C, false> {};
template <GemmConfig C, bool kNeeded = C.shares_scale_with_peer>
struct Deliveries {
  Barrier delivered[2][C.math_warpgroups];
};
template <GemmConfig C>
struct Deliveries<C, false> {};
template <GemmConfig C>
struct Magnitudes : RowMagnitudes<C>, ColumnMagnitudes<C>, Deliveries<C> {};

template <GemmConfig C>
__device__ void init_magnitudes(Magnitudes<C>& magnitudes) {
  if constexpr (C.shares_scale_with_peer) {
    constexpr int kGroups = C.math_warpgroups;
    for (int i = 0; i < 2 * kGroups; ++i) magnitudes.delivered[i / kGroups][i % kGroups].init(1);
  }
}

// The tail on its way out.
template <GemmConfig C, bool kNeeded = (C.tail > 0)>
struct TailOutput {
  alignas(128) uint8_t tail[C.tail_boxes][C.tail * 64 * (C.gate_up ? 1 : 2)];
};
template <GemmConfig C>
struct TailOutput<C, false> {};

template <GemmConfig C>
struct Shared : Inbox<C> {
  __device__ uint8_t* token_operand(int stage, int i) { return C.swap_ab ? cols[stage][i] : rows[stage][i]; }
  __device__ uint8_t* weight_operand(int stage, int i) { return C.swap_ab ? rows[stage][i] : cols[stage][i]; }

  // 1024 B: required by the 128 B swizzle.
  alignas(1024) uint8_t rows[C.stages][C.k_blocks_per_stage][(C.wgmma_m + C.tail) * kBlock];
  alignas(1024) uint8_t cols[C.stages][C.k_blocks_per_stage][C.wgmma_n * kBlock];
  alignas(1024) uint8_t output[C.row_warpgroups][C.store_boxes][C.store_box_bytes];
  [[no_unique_address]] TailOutput<C> tail_output;
  struct alignas(128) {  // 128 B: required by TMA
    float scales[C.k_blocks_per_stage][C.token_scales];
  } tokens[C.stages];
  struct alignas(16) {
    float scales[C.k_blocks_per_stage][C.weight_scales];
  } weights[C.stages];
  [[no_unique_address]] TileRing<C> tiles;
  [[no_unique_address]] Magnitudes<C> magnitudes;
  alignas(8) Barrier full[C.stages];
  Barrier empty[C.stages];
  Barrier delivered;
};

// One thread calls this, before all others use the barriers; `init_magnitudes` and `fence_barrier_init` follow.
template <GemmConfig C>
__device__ void init_barriers(Shared<C>& shared) {
  for (int i = 0; i < C.stages; ++i) {
    shared.full[i].init(1 + kWarp);
    shared.empty[i].init(C.math_warpgroups * (kWarpgroup + (C.multicast > 1 ? 4 : 0)));
  }
  shared.delivered.init(1);
  if constexpr (C.grouped) shared.tiles.init();
}

// Where a math thread stands: its warpgroup, and its fragments of a 64-row WGMMA.
template <GemmConfig C>
struct Thread {
  int group, index, warp, lane;
  int row, col;   // the fragments lie in rows row and row + 8, and in columns col and col + 1 of 8
  int peer = -1;  // the CTA that loads tokens for this one, if this lane tells it what was read
  __device__ bool has_rows(const TileCoord<C>& coord) const {
    return coord.begin() < (group + 1) * 64 && group * 64 < coord.end();
  }
  __device__ Thread()
      : group(warp_uniform(threadIdx.x / kWarpgroup)),
        index(threadIdx.x % kWarpgroup),
        warp(index / kWarp),
        lane(index % kWarp),
        row(group * 64 + warp * 16 + lane / 4),
        col(lane % 4 * 2) {
    if constexpr (C.multicast > 1) {
      const int rank = cluster_rank(), other = rank / 2 * 2 + lane;
      if (lane < 2 && other != rank) peer = other;
    }
  }
};

// Nothing makes an arrival wait for the thread's reads in flight, and it may overtake them while others keep the shared
// memory busy. Without swap_ab, these compilers have the scales in registers before the arrival: `make
// verify-compilers` reads that in the machine code of each. The last product of a tile has a fence of its own, see
// `consume`. With any other compiler, every release has a fence.
constexpr bool kIsVerifiedCompiler =
    (__CUDACC_VER_MAJOR__ == 12 &&
     (__CUDACC_VER_MINOR__ == 6 || __CUDACC_VER_MINOR__ == 8 || __CUDACC_VER_MINOR__ == 9)) ||
    (__CUDACC_VER_MAJOR__ == 13 && (__CUDACC_VER_MINOR__ == 0 || __CUDACC_VER_MINOR__ == 5));

// This thread has read the stage, so the CTAs that load it may fill it again. Every lane says so to its own CTA, whose
// producers overwrite the scales that it has read; with multicast one lane says so to the other CTA, which overwrites
// what only the WGMMAs have read, and those are complete for the whole warp.
template <GemmConfig C>
__device__ void release(Shared<C>& shared, int stage, const Thread<C>& thread) {
  if constexpr (C.swap_ab || !kIsVerifiedCompiler) fence_cta();
  shared.empty[stage].arrive();
  if constexpr (C.multicast > 1) {
    if (thread.peer >= 0) shared.empty[stage].arrive_in_cluster(thread.peer);
  }
}

// A math warpgroup has no tokens in this tile. The others wait for it on each stage all the same.
template <GemmConfig C, class Scheduler>
__device__ void skip_tile(Shared<C>& shared, Scheduler& schedule, const Thread<C>& thread) {
#pragma unroll 1
  for (int k = schedule.k_begin; k < schedule.k_end; ++k, schedule.next_stage()) {
    shared.full[schedule.stage].wait(schedule.parity);
    release(shared, schedule.stage, thread);
  }
}
