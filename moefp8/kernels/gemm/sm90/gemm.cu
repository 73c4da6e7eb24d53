// FP8 GEMM on Hopper: d[M, N] = (a * a_scale) (b * b_scale)^T + bias, in BF16; dense, or grouped. With gate_up, b is
// gate and up, and d is silu(gate) * up in E4M3 with a scale for each 128 outputs of a token.
//
// a [M, K] and b [N, K] are E4M3 with K innermost; a has a scale for each 1x128 block, b for each 128x128 block. In a
// grouped GEMM, each group of tokens has a b of its own, and only the device knows which tokens are of which group.
//
// The kernel is persistent and warp-specialised: producer warps fill the stages of a pipeline, consumer warpgroups
// empty it, and a scheduler says which tile is next. docs/hopper-fp8-gemm.md walks through it.
#include "consumer.cuh"
#include "producer.cuh"
#include "tail.cuh"

// Formula   d = sum over k-blocks of (a_scale * b_scale) * (a b^T), each k-block summed by WGMMA.
// Grid      clusters of tiles_per_cluster * split_k CTAs, each with at least one tile; with split_k > 1 exactly one.
//           A CTA has a tile of wgmma_m x wgmma_n at a time. The grid does not depend on how many tokens groups have.
// Shared    `stages` stages of both operands and their scales; the tile on its way out; the inbox for sums of other
//           CTAs; magnitudes of other warps or of the peer.
// Barriers  full[stage]: arrivals of the producer's elected lane and of each lane of the scales' producer, TMA's bytes;
//           empty[stage]: each math thread, and with multicast each math warp of the other CTA;
//           delivered: the sums of other CTAs for this one's slice, or the peer's magnitudes, in bytes;
//           tiles: see `TileRing` in schedule.cuh.
// Alignment a, b, d and the token scales [K/128, M]: address, row and matrix pitch multiples of 16 B (TMA).
template <GemmConfig C>
__global__ void __launch_bounds__(C.threads, C.ctas_per_sm)
    gemm_kernel(const __grid_constant__ TokenMaps<C> token_maps, const __grid_constant__ TensorMap token_scale_map,
                const __grid_constant__ WeightMaps<C> weight_maps, const __grid_constant__ TensorMap d_map,
                const __grid_constant__ Arguments args) {
  static_assert(is_valid<C>());
  static_assert(sizeof(Shared<C>) == C.shared_bytes, "the host counts as the compiler does");
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<C>*>(memory);

  const int group = warp_uniform(threadIdx.x / kWarpgroup);
  const int warp = warp_uniform(threadIdx.x % kWarpgroup / kWarp), lane = threadIdx.x % kWarp;
  const bool is_producer = group == C.math_warpgroups && warp == 0;
  const bool is_scale_producer = group == C.math_warpgroups && warp == 1;
  const bool is_scheduler = C.grouped && group == C.math_warpgroups && warp == 2;
  SchedulerOf<C> schedule(shared, args);
  ScaleProducer<C> scale_producer{args, lane};
  GroupedScheduler<C> scheduler{args, lane};

  // Initialise the barriers, and read meanwhile what is needed first.
  if (is_producer) {
    if (elect_one()) {
      init_barriers(shared);
      if constexpr (C.gate_up) init_magnitudes<C>(shared.magnitudes);
      fence_barrier_init();
    }
    __syncwarp();
  } else if (is_scale_producer && !C.grouped) {
    scale_producer.read(schedule);  // before the operands, behind which the scales would queue
  } else if (is_scheduler) {
    if constexpr (C.grouped) scheduler.prepare();
  }

  // Load early, since everyone waits for it. A grouped GEMM does not know its tiles yet, so it prefetches by guess.
  Producer<C> producer{shared, token_maps, token_scale_map, weight_maps, elect_one()};
  if (is_producer) {
    if constexpr (C.grouped) producer.prefetch_expected(args);
    else producer.fill(schedule, args.programmatic);
  }

  // Meet the CTA, and the cluster. With split_k, `reduce_split_k` waits for the cluster, long after this.
  __syncthreads();
  if constexpr (C.tiles_per_cluster * C.split_k > 1) cluster_arrive();
  if constexpr (C.tiles_per_cluster > 1) cluster_wait();

  // Each warp takes its role. Registers follow the work: those that load and schedule need few of them.
  if (group == C.math_warpgroups) {
    if constexpr (C.moves_registers) give_registers<C.producer_registers>();
    if constexpr (C.grouped) {
      if (is_scheduler) scheduler.run(shared);
    }
    if (is_producer) {
      schedule.start();
      if constexpr (C.grouped) producer.fill(schedule, args.programmatic);
      producer.run(schedule);
    }
    if (is_scale_producer) {
      schedule.start();
      if (C.grouped && !schedule.done()) scale_producer.read(schedule);
      scale_producer.run(shared, schedule);
    }
  } else if (group == C.row_warpgroups) {
    if constexpr (C.tail > 0) {
      give_registers<C.tail_registers>();
      schedule.start();
      consume_tail<C>(shared, args, schedule);
    }
  } else {
    if constexpr (C.moves_registers) take_registers<C.math_registers>();
    schedule.start();
    consume<C>(shared, d_map, args, schedule);
  }
}
