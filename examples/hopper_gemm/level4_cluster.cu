// Level 4: CTAs work together, and stay. New against level 3:
// - Multicast: the two CTAs of a cluster compute tiles of the same rows, and each loads half of these rows for both.
// - Persistence: a CTA computes tile after tile, so the producer loads the next tile while this one is stored.
// - Bands: tiles are walked such that what all CTAs read at about the same time fits into the L2 cache.
#include "parts.cuh"

constexpr int kTileM = 128, kTileN = 128;  // of a CTA
constexpr int kMathWarpgroups = kTileM / 64;
constexpr int kThreads = (kMathWarpgroups + 1) * kWarpgroup;
constexpr int kStages = 6;
constexpr int kStageBytes = (kTileM + kTileN) * kBlock;

struct Shared {
  alignas(1024) uint8_t a[kStages][kTileM * kBlock];  // 1024 B: required by the 128 B swizzle
  alignas(1024) uint8_t b[kStages][kTileN * kBlock];
  Barrier full[kStages], empty[kStages];
};
static_assert(sizeof(Shared) <= kMaxSharedBytes);

// Calls compute(first_row, first_col) for each tile of this CTA. The CTAs of a cluster have neighbouring columns.
template <int kCtas, class Compute>
__device__ inline void for_each_tile(const Arguments& args, int rank, Compute compute) {
  const int num_clusters = gridDim.x / kCtas, per_band = args.band * args.col_tiles;
  for (int i = blockIdx.x / kCtas; i < args.row_tiles * args.col_tiles; i += num_clusters) {
    const int first = i / per_band * args.band, in_band = i % per_band;
    const int height = min(args.band, args.row_tiles - first);  // the last band may be lower
    compute((first + in_band % height) * kTileM, (in_band / height * kCtas + rank) * kTileN);
  }
}

// One warp: fills each stage as soon as both CTAs have emptied it, since it writes its half of a into both.
template <int kCtas>
__device__ inline void produce(Shared& shared, const TensorMap& a_map, const TensorMap& b_map, const Arguments& args,
                               int rank) {
  constexpr int kRows = kTileM / kCtas;
  constexpr uint16_t kAll = (1 << kCtas) - 1;  // a bit for each CTA
  const bool elected = elect_one();
  Ring<kStages> ring;
  for_each_tile<kCtas>(args, rank, [&](int first_row, int first_col) {
    for (int k_block = 0; k_block < args.num_k_blocks; ++k_block, ring.next()) {
      Barrier& full = shared.full[ring.stage];
      uint8_t* own_rows = shared.a[ring.stage] + rank * kRows * kBlock;
      const Corner at{k_block * kBlock, first_row + rank * kRows, 0};
      shared.empty[ring.stage].wait(ring.parity ^ 1);
      full.arrive_and_expect(elected, kStageBytes);  // with the other CTA's half, which may come before this
      if constexpr (kCtas > 1) tma_load_multicast(elected, own_rows, a_map, full, at, kAll);
      else tma_load<3>(elected, own_rows, a_map, full, at, L2Policy::usual());
      tma_load<2>(elected, shared.b[ring.stage], b_map, full, {k_block * kBlock, first_col}, {});
    }
  });
  // The other CTA signals to this one, so this one stays until all signals have come.
  for (int i = 0; i < kStages; ++i, ring.next()) shared.empty[ring.stage].wait(ring.parity ^ 1);
}

// One math warpgroup. A tile after the last column has zeros and is not stored, but the other CTA needs its half of a.
template <int kCtas>
__device__ inline void consume(Shared& shared, const Arguments& args, int warpgroup, int rank) {
  const bool signals = kCtas > 1 && threadIdx.x % kWarp == 0;
  Ring<kStages> ring;
  for_each_tile<kCtas>(args, rank, [&](int first_row, int first_col) {
    const ScaleReader reader(args, first_row + warpgroup * 64, first_col);
    Scales next = reader.read(0);
    float total[kTileN / 2] = {}, product[kTileN / 2];
    for (int k_block = 0; k_block < args.num_k_blocks; ++k_block, ring.next()) {
      const Scales scales = next;
      shared.full[ring.stage].wait(ring.parity);
      begin_product<kTileN>(product, wgmma_descriptor_low(shared.a[ring.stage] + warpgroup * 64 * kBlock),
                            wgmma_descriptor_low(shared.b[ring.stage]));
      next = reader.read(min(k_block + 1, args.num_k_blocks - 1));  // they arrive while this k-block is multiplied
      finish_product(product);
      shared.empty[ring.stage].arrive();
      if (signals) shared.empty[ring.stage].arrive_in_cluster(rank ^ 1);
      promote(total, product, scales.a, scales.b);
    }
    store_rows(total, args, first_row + warpgroup * 64, first_col);
  });
}

// Formula   d = sum over k-blocks of (a_scale * b_scale) * (a b^T), each k-block summed by WGMMA.
// Grid      as many clusters of kCtas CTAs as run at a time; a CTA has a tile of 128 x 128 at a time, and a math
//           warpgroup 64 rows of it. With kCtas = 1 nothing is shared: it tells what multicast brings.
// Shared    6 stages of a k-block of both operands, rows of 128 B that TMA swizzles: 192 KB.
// Barriers  full[stage]: the producer's elected lane, which announces TMA's bytes, those of both CTAs (1 arrival);
//           empty[stage]: each math thread of this CTA, and one lane of each math warp of the other CTA.
// Alignment a, b: 16 B and K a multiple of 128; d: 4 B and N a multiple of 2.
template <int kCtas>
__global__ void __launch_bounds__(kThreads, 1)
    cluster(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
            const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup), warp = warp_uniform(threadIdx.x / kWarp);
  const int rank = kCtas > 1 ? cluster_rank() : 0;

  if (threadIdx.x == 0) {
    constexpr int kSignals = kWarpgroup + (kCtas - 1) * kWarpgroup / kWarp;  // of a math warpgroup of each CTA
    for (int i = 0; i < kStages; ++i) shared.full[i].init(1), shared.empty[i].init(kMathWarpgroups * kSignals);
    fence_barrier_init();
  }
  __syncthreads();
  if constexpr (kCtas > 1) cluster_arrive(), cluster_wait();  // nobody signals to a CTA whose barriers are not ready

  if (warpgroup == kMathWarpgroups) {
    give_registers<24>();
    if (warp % 4 == 0) produce<kCtas>(shared, a_map, b_map, args, rank);
  } else {
    take_registers<240>();
    consume<kCtas>(shared, args, warpgroup, rank);
  }
}
