// Level 5: between two products of a warpgroup there is a promotion, and nothing else. New against level 4:
// - Tiles of 128 x 256: for each product, TMA and the L2 cache bring a quarter less. A warpgroup computes its rows in
//   two parts of 128 columns, which use one product buffer in turn: for two, its registers would not suffice.
//   Multicast then brings nothing (docs/design/gemm.md), so each CTA works alone.
// - While the tensor cores have the last part of a k-block, the warpgroup waits for the next stage, reads its scales
//   and goes round the loop. The scales of a come with the stage, by TMA.
// - A part leaves while the first products of the next tile are under way: through shared memory, by TMA.
#include "parts.cuh"

constexpr int kPartN = 128;  // columns of a part: those of one block of b, so a part has one scale of b

// kMathWarpgroups: 2 or 3, each with 64 rows of a tile. kParts: 1 or 2.
template <int kMathWarpgroups, int kParts, int kStages>
struct Shared {
  static constexpr int kTileM = 64 * kMathWarpgroups, kTileN = kPartN * kParts;
  static constexpr int kStageBytes = (kTileM + kTileN) * kBlock + kTileM * 4;  // what TMA brings
  alignas(1024) uint8_t a[kStages][kTileM * kBlock];  // 1024 B: required by the 128 B swizzle
  alignas(1024) uint8_t b[kStages][kTileN * kBlock];
  alignas(1024) uint8_t d[kMathWarpgroups][2][64 * 128];  // a part on its way out: two boxes of 64 rows, 64 columns
  alignas(128) float a_scales[kStages][kTileM];           // 128 B: required by TMA
  Barrier full[kStages], empty[kStages];
};

// Calls compute(first_row, first_col) for each tile of this CTA.
template <class S, class Compute>
__device__ inline void for_each_tile(const Arguments& args, Compute compute) {
  const int per_band = args.band * args.col_tiles;
  for (int i = blockIdx.x; i < args.row_tiles * args.col_tiles; i += gridDim.x) {
    const int first = i / per_band * args.band, in_band = i % per_band;
    const int height = min(args.band, args.row_tiles - first);  // the last band may be lower
    compute((first + in_band % height) * S::kTileM, in_band / height * S::kTileN);
  }
}

// One warp: fills each stage as soon as it is empty.
template <int kMathWarpgroups, int kParts, int kStages>
__device__ inline void produce(Shared<kMathWarpgroups, kParts, kStages>& shared, const TensorMap& a_map,
                               const TensorMap& a_scale_map, const TensorMap& b_map, const Arguments& args) {
  using S = Shared<kMathWarpgroups, kParts, kStages>;
  const bool elected = elect_one();
  Ring<kStages> ring;
  for_each_tile<S>(args, [&](int first_row, int first_col) {
#pragma unroll 1
    for (int k_block = 0; k_block < args.num_k_blocks; ++k_block, ring.next()) {
      Barrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.parity ^ 1);
      full.arrive_and_expect(elected, S::kStageBytes);
      tma_load<2>(elected, shared.b[ring.stage], b_map, full, {k_block * kBlock, first_col}, {});
      tma_load<2>(elected, shared.a[ring.stage], a_map, full, {k_block * kBlock, first_row}, {});
      tma_load<2>(elected, shared.a_scales[ring.stage], a_scale_map, full, {first_row, k_block}, {});
    }
  });
}

// Stores a warpgroup's 64 rows of a part through `staging`.
__device__ inline void store_part(const float (&total)[kPartN / 2], uint8_t (&staging)[2][64 * 128],
                                  const TensorMap& d_map, int first_row, int first_col) {
  const int index = threadIdx.x % kWarpgroup, warp = index / kWarp, lane = index % kWarp;
  const int barrier = 1 + threadIdx.x / kWarpgroup;
  if (index == 0) tma_store_wait_read();  // what was there before has left
  named_barrier<kWarpgroup>(barrier);
  // Four matrices of 8 x 8 at a time: rows 0-7 and 8-15 of the warp, of two groups of eight columns. Lane l addresses
  // row l % 8 of matrix l / 8. The 128 B swizzle of TMA orders a row's units of 16 B by the row's number.
#pragma unroll
  for (int group = 0; group < kPartN / 8; group += 2) {
    const int row = warp * 16 + lane % 16, unit = group % 8 + lane / 16;
    const uint32_t address = shared_address(staging[group / 8]) + row * 128 + (unit ^ row % 8) * 16;
    const float* x = total + group * 4;
    store_matrices<false>(address, pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                          pack_bf16(x[6], x[7]));
  }
  fence_for_async();
  named_barrier<kWarpgroup>(barrier);
  if (index == 0) {
    for (int box = 0; box < 2; ++box) tma_store<2>(d_map, staging[box], {first_col + 64 * box, first_row});
    tma_store_commit();
  }
}

// The scales of a k-block for all parts: of a for rows `row` and `row` + 8 (`Place`), of b for each part.
template <int kParts>
struct PartScales {
  float a[2], b[kParts];
};

// One math warpgroup. It takes turns on the tensor cores with the other one. For two parts:
//
//   begin 0 | finish 0, begin 1 | finish 1, begin 0 | finish 0, begin 1 | ... | finish 1
//
// `finish` waits for the product and promotes it; meanwhile the tensor cores have what the other warpgroup began.
template <int kMathWarpgroups, int kParts, int kStages>
__device__ inline void consume(Shared<kMathWarpgroups, kParts, kStages>& shared, const TensorMap& d_map,
                               const Arguments& args, int warpgroup) {
  using S = Shared<kMathWarpgroups, kParts, kStages>;
  constexpr int kLast = kParts - 1;
  const int row = warpgroup * 64 + Place().row;
  const uint32_t a = wgmma_descriptor_low(shared.a[0] + warpgroup * 64 * kBlock);
  const uint32_t b = wgmma_descriptor_low(shared.b[0]);
  float total[kParts][kPartN / 2] = {}, product[kPartN / 2];
  PartScales<kParts> scales, next;  // of the k-block whose products are under way; of the one after it
  const float* b_scales[kParts];
  Ring<kStages> ring;
  int stage = 0;                        // of the product under way; `ring` may be one ahead
  int stored_row = -1, stored_col = 0;  // where the tile in `total` will be stored; -1: there is none

  const auto read_scales = [&](int k_block) __attribute__((always_inline)) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) next.b[part] = b_scales[part][k_block];
    shared.full[ring.stage].wait(ring.parity);
    next.a[0] = shared.a_scales[ring.stage][row], next.a[1] = shared.a_scales[ring.stage][row + 8];
  };
  const auto begin = [&](int part) __attribute__((always_inline)) {
    if (part == 0) scales = next, stage = ring.stage;
    begin_product<kPartN>(product, a + stage * (sizeof(shared.a[0]) / 16),
                          b + stage * (sizeof(shared.b[0]) / 16) + part * (kPartN * kBlock / 16));
    if (part == kLast) ring.next();
  };
  const auto finish = [&](int part) __attribute__((always_inline)) {
    finish_product(product);
    if (part == kLast) {
      // An arrival may overtake reads of shared memory. If a part came before, it needed the scales: they are here.
      if constexpr (kParts == 1) fence_cta();
      shared.empty[stage].arrive();
    }
    promote(total[part], product, scales.a, scales.b[part]);
  };
  const auto store = [&](int part) __attribute__((always_inline)) {
    if (stored_row < 0) return;
    store_part(total[part], shared.d[warpgroup], d_map, stored_row, stored_col + part * kPartN);
#pragma unroll
    for (int i = 0; i < kPartN / 2; ++i) total[part][i] = 0.0f;
  };

  for_each_tile<S>(args, [&](int first_row, int first_col) __attribute__((always_inline)) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {  // a part after the last column has any scale, and is not stored
      const int64_t block = min(first_col + part * kPartN, args.n - 1) / kBlock;
      b_scales[part] = args.b_scales + block * args.num_k_blocks;
    }
    read_scales(0);
    begin(0), store(0);
#pragma unroll
    for (int part = 1; part < kParts; ++part) finish(part - 1), begin(part), store(part);
#pragma unroll 1
    for (int k_block = 1; k_block < args.num_k_blocks; ++k_block) {
      read_scales(k_block);
#pragma unroll
      for (int part = 0; part < kParts; ++part) finish((part + kLast) % kParts), begin(part);
    }
    finish(kLast);
    stored_row = first_row + warpgroup * 64, stored_col = first_col;
  });
#pragma unroll
  for (int part = 0; part < kParts; ++part) store(part);
  if (threadIdx.x % kWarpgroup == 0) tma_store_wait_read();  // shared memory lives until TMA has read it
}

// Formula   d = sum over k-blocks of (a_scale * b_scale) * (a b^T), each k-block summed by WGMMA.
// Grid      as many CTAs as run at a time; a CTA has a tile of 64 kMathWarpgroups x 128 kParts at a time.
// Shared    kStages stages of a k-block of both operands, which TMA swizzles, and of the scales of a; a part on its way
//           out for each math warpgroup. With 2, 2 and 4: 226 KB.
// Barriers  full[stage]: the producer's elected lane, which announces TMA's bytes (1 arrival); empty[stage]: each math
//           thread; a named barrier for each math warpgroup, around its staging of d.
// Alignment a, b, d: 16 B, K a multiple of 128, N of 8, a_scale_pitch of 4 (TMA).
template <int kMathWarpgroups, int kParts, int kStages>
__global__ void __launch_bounds__((kMathWarpgroups + 1) * kWarpgroup, 1)
    overlap(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap a_scale_map,
            const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap d_map,
            const __grid_constant__ Arguments args) {
  using S = Shared<kMathWarpgroups, kParts, kStages>;
  static_assert(sizeof(S) <= kMaxSharedBytes);
  extern __shared__ __align__(1024) uint8_t memory[];
  S& shared = *reinterpret_cast<S*>(memory);
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup), warp = warp_uniform(threadIdx.x / kWarp);

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) shared.full[i].init(1), shared.empty[i].init(kMathWarpgroups * kWarpgroup);
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == kMathWarpgroups) {
    give_registers<kMathWarpgroups == 2 ? 24 : 32>();
    if (warp % 4 == 0) produce(shared, a_map, a_scale_map, b_map, args);
  } else {
    take_registers<kMathWarpgroups == 2 ? 240 : 160>();
    consume(shared, d_map, args, warpgroup);
  }
}
