// The GEMM of gradients in weights on Hopper: d[e][M, N] = sum over the tokens t of expert e of a[:, t] b[:, t]^T. a
// has a scale for 128 tokens of a feature, and so has b, or one for 128 features, too.
//
// a is [B, M, 128] and b [B, N, 128] in E4M3: blocks of 128 tokens, which lie side by side. Only the device knows which
// tokens are of which expert. The kernel is persistent and warp-specialised, as gemm.cu is: one warp loads stages, the
// math warpgroups multiply and promote. A finished tile leaves through shared memory, or from registers where TMA
// cannot address d; where registers suffice, while the first products of the next one are under way.
// docs/design/wgrad.md says why it is so.
#include "pipeline.cuh"
#include "schedule.cuh"
#include "store.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// One warp. Its elected lane issues the loads.
template <KGroupedConfig C>
__device__ void produce(Shared<C>& shared, const Maps& maps, const Arguments& args) {
  const bool elected = elect_one();
  const L2Policy policy = L2Policy::usual();
  Schedule<C> schedule(args);
#pragma unroll 1
  for (; !schedule.done; schedule.next_tile()) {
#pragma unroll 1
    for (; schedule.block < schedule.num_blocks - 1; schedule.next_stage()) {
      const int block = schedule.first_block + (schedule.block < 0 ? schedule.num_blocks - 1 : schedule.block);
      const int stage = schedule.stage;
      Barrier& full = shared.full[stage];
      shared.empty[stage].wait(schedule.parity ^ 1);
      full.arrive_and_expect(elected, C.stage_bytes);
      if constexpr (C.multicast > 1) {
        constexpr int kHalf = C.tile_m / 2;
        const int first = cluster_rank() * kHalf;
        tma_load_multicast(elected, shared.rows[stage] + first * kBlock, maps.a, full, {0, schedule.row + first, block},
                           3);
      } else {
        tma_load<3>(elected, shared.rows[stage], maps.a, full, {0, schedule.row, block}, policy);
      }
      tma_load<3>(elected, shared.cols[stage], maps.b, full, {0, schedule.col, block}, policy);
      tma_load<2>(elected, shared.scales[stage].rows, maps.a_scales, full, {schedule.row, block, 0}, policy);
      tma_load<2>(elected, shared.scales[stage].cols, maps.b_scales, full,
                  {C.blocks_b ? schedule.col / kBlock / 4 * 4 : schedule.col, block, 0}, policy);
    }
  }
  if constexpr (C.multicast > 1) {  // this CTA stays until all signals to it have arrived
#pragma unroll 1
    for (int i = 0; i < C.stages; ++i, schedule.next_stage()) shared.empty[schedule.stage].wait(schedule.parity ^ 1);
  }
}

// ---- The math ----

// The scales of a block of tokens that a thread needs, for all parts. Those of single columns are the reason why a
// warpgroup has its parts below each other: they come from shared memory, which the tensor cores wait for, too.
template <KGroupedConfig C, bool kBlocksB = C.blocks_b>
struct Scales {
  float rows[C.parts][2];
  float2 cols[C.tile_n / 8];

  __device__ void load(const Shared<C>& shared, const Schedule<C>& schedule, const Thread<C>& thread) {
    const auto& scales = shared.scales[schedule.stage];
#pragma unroll
    for (int i = 0; i < 2 * C.parts; ++i) rows[i / 2][i % 2] = scales.rows[thread.row + i / 2 * 64 + i % 2 * 8];
#pragma unroll
    for (int j = 0; j < C.tile_n / 8; ++j) cols[j] = *reinterpret_cast<const float2*>(scales.cols + 8 * j + thread.col);
  }
  // That of the i-th product of a thread in a part.
  __device__ float product(int part, int i) const {
    return __fmul_rn(rows[part][i / 2 % 2], i % 2 ? cols[i / 4].y : cols[i / 4].x);
  }
};
template <KGroupedConfig C>
struct Scales<C, true> {
  float rows[C.parts][2];  // times that of all columns

  __device__ void load(const Shared<C>& shared, const Schedule<C>& schedule, const Thread<C>& thread) {
    const auto& scales = shared.scales[schedule.stage];
    const float of_block = scales.cols[schedule.col / kBlock % 4];
#pragma unroll
    for (int i = 0; i < 2 * C.parts; ++i)
      rows[i / 2][i % 2] = __fmul_rn(scales.rows[thread.row + i / 2 * 64 + i % 2 * 8], of_block);
  }
  __device__ float product(int part, int i) const { return rows[part][i / 2 % 2]; }
};

template <KGroupedConfig C>
struct ProductBuffer {
  float products[C.tile_n / 2];

  // Gives the tensor cores the products of one part of a stage. kIsWhole: all tokens of the block exist.
  template <bool kIsWhole>
  __device__ void begin(Shared<C>& shared, const Schedule<C>& schedule, int part, const Thread<C>& thread) {
    const int stage = schedule.stage;
    const uint32_t a = wgmma_descriptor_low(shared.rows[0] + (thread.group * C.parts + part) * 64 * kBlock) +
                       stage * (sizeof(shared.rows[0]) / 16);
    const uint32_t b = wgmma_descriptor_low(shared.cols[0]) + stage * (sizeof(shared.cols[0]) / 16);
    pin_registers(products);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlock / kStep; ++i) {
      if (kIsWhole || i < schedule.first_steps) {
        const uint32_t step = i * kDescriptorStepK;
        wgmma<C.tile_n>(products, wgmma_descriptor(a + step), wgmma_descriptor(b + step), i > 0);
      }
    }
    wgmma_commit();
  }
  // The registers of the products are free until `begin` overwrites them, which the compiler cannot know.
  __device__ void forget() {
#pragma unroll
    for (int i = 0; i < C.tile_n / 2; ++i) products[i] = 0.0f;
  }
  // total += product * (row scale * column scale), once the tensor cores are done. Product and sum are rounded once.
  __device__ void promote(float (&total)[C.tile_n / 2], const Scales<C>& scales, int part) {
    pin_registers(products);
#pragma unroll
    for (int i = 0; i < C.tile_n / 2; ++i) total[i] = fmaf(scales.product(part, i), products[i], total[i]);
  }
};

// The math warpgroups. A finished tile stays in `total` until the next one begins.
template <KGroupedConfig C>
__device__ void consume(Shared<C>& shared, const Maps& maps, const Arguments& args) {
  const Thread<C> thread;
  Schedule<C> schedule(args);
  float total[C.parts][C.tile_n / 2];
  ProductBuffer<C> buffer;
  Scales<C> scales;
  int expert = -1, row = 0, col = 0;  // where the tile in `total` lies; -1: there is none yet

  const auto store = [&](int part) __attribute__((always_inline)) {
    if (expert >= 0) {
      if constexpr (C.stages_output) store_staged<C>(total[part], shared, maps, expert, row, col, part, thread);
      else store_part<C>(total[part], args, expert, row + part * 64, col, thread);
    }
#pragma unroll
    for (int i = 0; i < C.tile_n / 2; ++i) total[part][i] = 0.0f;
  };
  const auto store_all = [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int part = 0; part < C.parts; ++part) store(part);
  };
  // The stage was waited for. What can be done while the tensor cores have products, is done then: scales are read, the
  // stage before is released, the next one is waited for.
  const auto compute_block = [&](bool is_first) __attribute__((always_inline)) {
    const int stage_before = schedule.stage_before();
#pragma unroll
    for (int part = 0; part < C.parts; ++part) {
      if (is_first) buffer.template begin<false>(shared, schedule, part, thread);
      else buffer.template begin<true>(shared, schedule, part, thread);
      if (part == 0) {
        if (!is_first) release(shared, stage_before);
        scales.load(shared, schedule, thread);
      }
      if (part == C.parts - 1) {
        schedule.next_stage();
        if (schedule.block < schedule.num_blocks - 1) shared.full[schedule.stage].wait(schedule.parity);
      }
      if (is_first && !C.stores_first) store(part);
      wgmma_wait<0>();
      buffer.promote(total[part], scales, part);
    }
  };

#pragma unroll 1
  for (; !schedule.done; schedule.next_tile()) {
    if (schedule.num_blocks == 0) {
      if constexpr (C.output != Output::kAccumulate) store_zeros<C>(args, schedule);
      continue;
    }
    if constexpr (C.stores_first) {
      store_all();
      buffer.forget();
    }
    shared.full[schedule.stage].wait(schedule.parity);
    compute_block(true);
#pragma unroll 1
    while (schedule.block < schedule.num_blocks - 1) compute_block(false);
    release(shared, schedule.stage_before());
    expert = schedule.expert, row = schedule.row, col = schedule.col;
  }
  store_all();
  if (C.stages_output && threadIdx.x % kWarpgroup == 0) tma_store_wait_read();
}

// Formula   d[e] (+)= sum over blocks of 128 tokens of e of (a_scale * b_scale) * (a b^T), each summed by WGMMA.
// Grid      as many clusters as run at once, at most one for each tile; they walk over the tiles of all experts. A CTA
//           has a tile of `parts` times 64 rows for each math warpgroup and tile_n columns.
// Shared    `stages` stages of both operands and their scales; tiles on their way out.
// Barriers  full[stage]: one arrival of the producer's elected lane, and TMA's bytes;
//           empty[stage]: each math thread, and with multicast each math warp of the other CTA.
// Alignment a, b and scales: address and pitches multiples of 16 B (TMA); d too if it leaves through shared memory.
template <KGroupedConfig C>
__global__ void __launch_bounds__(C.threads, 1)
    k_grouped_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments args) {
  static_assert(sizeof(Shared<C>) <= C.shared_bytes, "the host counts as the compiler does");
  static_assert(C.tile_n % 32 == 0, "store_part");
  static_assert(!C.blocks_b || kBlock % C.tile_n == 0, "all columns of a tile have one scale");
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<C>*>(memory);

  if (threadIdx.x == 0) {
    for (int i = 0; i < C.stages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(C.warpgroups * (kWarpgroup + (C.multicast > 1 ? 4 : 0)));
    }
    fence_barrier_init();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();
  if constexpr (C.multicast > 1) cluster_arrive(), cluster_wait();

  if (warp_uniform(threadIdx.x / kWarpgroup) == C.warpgroups) {
    give_registers<C.producer_registers>();
    if (warp_uniform(threadIdx.x % kWarpgroup / kWarp) == 0) produce<C>(shared, maps, args);
  } else {
    take_registers<C.math_registers>();
    consume<C>(shared, maps, args);
  }
}
