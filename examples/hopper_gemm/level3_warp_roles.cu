// Level 3: warps take roles. New against level 2: a producer warp fills the stages, and math warpgroups empty them. No
// warpgroup waits for another one: each meets the producer alone, at `full` and `empty`. So they drift apart, and one
// promotes while the other multiplies. Registers move from the producer's warpgroup to the math warpgroups.
#include "parts.cuh"

constexpr int kTileM = 128, kTileN = 128;
constexpr int kMathWarpgroups = kTileM / 64;
constexpr int kThreads = (kMathWarpgroups + 1) * kWarpgroup;
constexpr int kStages = 4;
constexpr int kStageBytes = (kTileM + kTileN) * kBlock;

struct Shared {
  alignas(1024) uint8_t a[kStages][kTileM * kBlock];  // 1024 B: required by the 128 B swizzle
  alignas(1024) uint8_t b[kStages][kTileN * kBlock];
  Barrier full[kStages], empty[kStages];
};
static_assert(sizeof(Shared) <= kMaxSharedBytes);

// One warp: fills each stage as soon as it is empty.
__device__ inline void produce(Shared& shared, const TensorMap& a_map, const TensorMap& b_map, int num_k_blocks,
                               int first_row, int first_col) {
  const bool elected = elect_one();
  Ring<kStages> ring;
  for (int k_block = 0; k_block < num_k_blocks; ++k_block, ring.next()) {
    Barrier& full = shared.full[ring.stage];
    shared.empty[ring.stage].wait(ring.parity ^ 1);  // a fresh barrier has completed parity 1: the first round passes
    full.arrive_and_expect(elected, kStageBytes);
    tma_load<2>(elected, shared.a[ring.stage], a_map, full, {k_block * kBlock, first_row}, {});
    tma_load<2>(elected, shared.b[ring.stage], b_map, full, {k_block * kBlock, first_col}, {});
  }
}

// One math warpgroup: multiplies what is in a stage, hands the stage back, and promotes.
__device__ inline void consume(Shared& shared, const Arguments& args, int warpgroup, int first_row, int first_col) {
  const ScaleReader reader(args, first_row + warpgroup * 64, first_col);
  Scales next = reader.read(0);
  float total[kTileN / 2] = {}, product[kTileN / 2];
  Ring<kStages> ring;
  for (int k_block = 0; k_block < args.num_k_blocks; ++k_block, ring.next()) {
    const Scales scales = next;
    shared.full[ring.stage].wait(ring.parity);
    begin_product<kTileN>(product, wgmma_descriptor_low(shared.a[ring.stage] + warpgroup * 64 * kBlock),
                          wgmma_descriptor_low(shared.b[ring.stage]));
    next = reader.read(min(k_block + 1, args.num_k_blocks - 1));  // they arrive while this k-block is multiplied
    finish_product(product);
    shared.empty[ring.stage].arrive();
    promote(total, product, scales.a, scales.b);
  }
  store_rows(total, args, first_row + warpgroup * 64, first_col);
}

// Formula   d = sum over k-blocks of (a_scale * b_scale) * (a b^T), each k-block summed by WGMMA.
// Grid      a CTA of three warpgroups for each tile of 128 x 128; each math warpgroup has 64 rows of it.
// Shared    4 stages of a k-block of both operands, rows of 128 B that TMA swizzles: 128 KB.
// Barriers  full[stage]: the producer's elected lane, which announces TMA's bytes (1 arrival); empty[stage]: each math
//           thread.
// Alignment a, b: 16 B and K a multiple of 128; d: 4 B and N a multiple of 2.
__global__ void __launch_bounds__(kThreads, 1)
    warp_roles(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
               const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup), warp = warp_uniform(threadIdx.x / kWarp);
  const int first_row = blockIdx.x / args.col_tiles * kTileM, first_col = blockIdx.x % args.col_tiles * kTileN;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) shared.full[i].init(1), shared.empty[i].init(kMathWarpgroups * kWarpgroup);
    fence_barrier_init();
  }
  __syncthreads();

  // 384 threads start with 168 registers each, which is all that an SM has.
  if (warpgroup == kMathWarpgroups) {
    give_registers<24>();
    if (warp % 4 == 0) produce(shared, a_map, b_map, args.num_k_blocks, first_row, first_col);
  } else {
    take_registers<240>();
    consume(shared, args, warpgroup, first_row, first_col);
  }
}
