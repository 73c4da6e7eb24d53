// Level 2: TMA brings tiles into a ring of stages, and WGMMA multiplies them there. New against level 1: tensor cores,
// tensor maps, mbarriers. All threads do the same, but one warp also asks TMA for what comes next.
#include "parts.cuh"

constexpr int kTileM = 128, kTileN = 128;
constexpr int kThreads = kTileM / 64 * kWarpgroup;  // a WGMMA has 64 rows
constexpr int kStages = 4;
constexpr int kStageBytes = (kTileM + kTileN) * kBlock;

struct Shared {
  alignas(1024) uint8_t a[kStages][kTileM * kBlock];  // 1024 B: required by the 128 B swizzle
  alignas(1024) uint8_t b[kStages][kTileN * kBlock];
  Barrier full[kStages];
};
static_assert(sizeof(Shared) <= kMaxSharedBytes);

// Formula   d = sum over k-blocks of (a_scale * b_scale) * (a b^T), each k-block summed by WGMMA.
// Grid      a CTA of two warpgroups for each tile of 128 x 128; each warpgroup has 64 rows of it.
// Shared    4 stages of a k-block of both operands, rows of 128 B that TMA swizzles: 128 KB.
// Barriers  full[stage]: one lane that asks TMA, and announces its bytes (1 arrival); __syncthreads, when both
//           warpgroups have read a stage.
// Alignment a, b: 16 B and K a multiple of 128; d: 4 B and N a multiple of 2.
__global__ void __launch_bounds__(kThreads, 1)
    tma_wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
              const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
  const bool asks = warp_uniform(threadIdx.x / kWarp) == 0;
  const int first_row = blockIdx.x / args.col_tiles * kTileM, first_col = blockIdx.x % args.col_tiles * kTileN;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) shared.full[i].init(1);
    fence_barrier_init();
  }
  __syncthreads();

  // Asks for a k-block. One warp calls this, and one lane of it asks; the copy is under way when it returns.
  const auto load = [&](int stage, int k_block) {
    if (k_block >= args.num_k_blocks) return;
    const bool elected = elect_one();
    Barrier& full = shared.full[stage];
    full.arrive_and_expect(elected, kStageBytes);
    tma_load<2>(elected, shared.a[stage], a_map, full, {k_block * kBlock, first_row}, {});
    tma_load<2>(elected, shared.b[stage], b_map, full, {k_block * kBlock, first_col}, {});
  };
  if (asks) {
    for (int i = 0; i < kStages; ++i) load(i, i);
  }

  const ScaleReader reader(args, first_row + warpgroup * 64, first_col);
  float total[kTileN / 2] = {}, product[kTileN / 2];
  Ring<kStages> ring;
  for (int k_block = 0; k_block < args.num_k_blocks; ++k_block, ring.next()) {
    const Scales scales = reader.read(k_block);
    shared.full[ring.stage].wait(ring.parity);
    begin_product<kTileN>(product, wgmma_descriptor_low(shared.a[ring.stage] + warpgroup * 64 * kBlock),
                          wgmma_descriptor_low(shared.b[ring.stage]));
    finish_product(product);
    __syncthreads();  // both warpgroups have read the stage
    if (asks) load(ring.stage, k_block + kStages);
    promote(total, product, scales.a, scales.b);
  }
  store_rows(total, args, first_row + warpgroup * 64, first_col);
}
