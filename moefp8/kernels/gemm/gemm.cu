// FP8 GEMM on Hopper: d[M, N] = (a * a_scale) (b * b_scale)^T + bias, in BF16; dense, or grouped. Of experts (kGateUp),
// b is gate and up, and d is silu(gate) * up in E4M3 with a scale for each 128 outputs of a token.
//
// a [M, K] and b [N, K] are E4M3 with K innermost; a has a scale for each 1x128 block, b for each
// 128x128 block. Tokens are the M rows of a, weights the N rows of b. Grouped (kGrouped), each group of
// tokens has a b of its own, and only the device knows which tokens are of which group: groups.cuh.
//
// Each CTA owns one tile of kWgmmaM x kWgmmaN at a time. WGMMA computes it as rows x columns, and either
// operand may be the rows: tokens for large M; weights for small M, since WGMMA's rows come in 64s
// and its columns in 8s. Whoever is what, "row" and "column" below mean WGMMA's.
//
// In the field's words: a persistent, warp-specialised kernel. Producer warps (`Producer`, `ScaleProducer` in
// producer.cuh) fill a ring of stages, consumer warpgroups (`consume`, `consume_tail` in tail.cuh) empty it;
// `StaticScheduler` in tile.cuh is the tile scheduler and the state of that pipeline, of a grouped GEMM `GroupedScheduler` (static,
// or dynamic with a counter) and `SchedulerClient` in groups.cuh; `store` and `reduce_split_k` in epilogue/store.cuh, or `swiglu_epilogue`
// in epilogue/swiglu.cuh, are the epilogue. kMulticast is TMA multicast in a cluster, kSplitK split-K over its CTAs through
// distributed shared memory. With kNumProductBuffers = 2, a warpgroup promotes one product while the tensor cores compute the
// next. `L2Policy` is a cache hint, `prefetch_expected` a prefetch into L2.
#include "epilogue/swiglu.cuh"
#include "groups.cuh"
#include "producer.cuh"
#include "epilogue/store.cuh"
#include "tail.cuh"
#include "tile.cuh"
#include "wgmma.cuh"

// The scales of one k-block that this thread needs for all columns.
template <class C>
struct Scales {
  float weight[C::kSwapAb ? 1 : C::kWeightScales];
  float token[2];  // of its two rows, where tokens are the rows

  __device__ void load(const Shared<C>& shared, int stage, int d, int part, int row, const Thread<C>& thread) {
    const float* weights = shared.weights[stage].scales[d];
    if constexpr (C::kStacked) {
      weight[0] = weights[part];
    } else if constexpr (C::kSwapAb) {
      weight[0] = weights[C::kWeightScales == 1 ? 0 : TileCoord<C>::scale(thread.group * 64)];
    } else {
#pragma unroll
      for (int i = 0; i < C::kWeightScales; ++i) weight[i] = weights[i];
      token[0] = shared.tokens[stage].scales[d][row];
      token[1] = shared.tokens[stage].scales[d][row + 8];
    }
  }
};

// The second level of accumulation: total += partial * (token scale * weight scale).
template <class C>
__device__ void promote(float (&total)[C::kPartN / 2], const float (&partial)[C::kPartN / 2],
                        const Scales<C>& scales, const float* token_scales, int part, const Thread<C>& thread) {
  float scale[2];
#pragma unroll
  for (int j = 0; j < C::kPartN / 8; ++j) {
    const int col = (C::kStacked ? 0 : part * C::kPartN) + 8 * j;
    if constexpr (C::kSwapAb) {  // one weight scale; two token scales for each 8 columns
      const float2 token = *reinterpret_cast<const float2*>(token_scales + col + thread.col);
      scale[0] = token.x * scales.weight[0], scale[1] = token.y * scales.weight[0];
    } else if (j == 0 || TileCoord<C>::begins_scale(col)) {  // two token scales; here the weight scale changes
      const float weight = scales.weight[TileCoord<C>::scale(col)];
      scale[0] = scales.token[0] * weight, scale[1] = scales.token[1] * weight;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[4 * j + i] += scale[C::kSwapAb ? i % 2 : i / 2] * partial[4 * j + i];
  }
}

// What a warpgroup hands to the tensor cores at once: its rows of one stage, one part of the columns.
template <class C>
struct ProductBuffer {
  float products[C::kKBlocksPerStage][C::kPartN / 2];
  Scales<C> scales[C::kKBlocksPerStage];
  int stage;  // by the time that it is finished, the walk has moved on

  __device__ void begin(Shared<C>& shared, const SchedulerOf<C>& schedule, int part, const Thread<C>& thread) {
    stage = schedule.stage;
    const uint32_t rows = wgmma_descriptor_low(shared.rows[0][0] + thread.group * 64 * kBlock) +
                          stage * (sizeof(shared.rows[0]) / 16);
    const uint32_t cols = wgmma_descriptor_low(shared.cols[0][0]) + stage * (sizeof(shared.cols[0]) / 16);
    if (part == 0) shared.full[stage].wait(schedule.parity);  // the other parts are of the same stage
#pragma unroll
    for (int d = 0; d < C::kKBlocksPerStage; ++d) {
      scales[d].load(shared, stage, d, part, thread.row + schedule.coord.scale_offset(), thread);
      pin_registers(products[d]);
    }
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < C::kKBlocksPerStage; ++d) {
#pragma unroll
      for (int i = 0; i < kBlock / 32; ++i) {
        const int row = d * C::kWgmmaM + (C::kStacked ? part * C::kOutputs : 0);
        const int col = d * C::kWgmmaN + (C::kStacked ? 0 : part * C::kPartN);
        const uint32_t a = rows + row * kBlock / 16 + i * kDescriptorStepK;
        const uint32_t b = cols + col * kBlock / 16 + i * kDescriptorStepK;
        wgmma<C::kPartN>(products[d], wgmma_descriptor(a), wgmma_descriptor(b), i > 0);
      }
    }
    wgmma_commit();
  }
  // The registers of the products are free until `begin`, which overwrites them; the compiler cannot know that.
  __device__ void forget() {
#pragma unroll
    for (int d = 0; d < C::kKBlocksPerStage; ++d) {
#pragma unroll
      for (int i = 0; i < C::kPartN / 2; ++i) products[d][i] = 0.0f;
    }
  }
  // Once the tensor cores are done with it.
  __device__ void finish(float (&total)[C::kPartN / 2], Shared<C>& shared, int part, bool releases,
                         const Thread<C>& thread) {
#pragma unroll
    for (int d = 0; d < C::kKBlocksPerStage; ++d) pin_registers(products[d]);
    if (!C::kSwapAb && releases) release(shared, stage, thread);
#pragma unroll
    for (int d = 0; d < C::kKBlocksPerStage; ++d)
      promote<C>(total, products[d], scales[d], shared.tokens[stage].scales[d], part, thread);
    if (C::kSwapAb && releases) release(shared, stage, thread);
  }
};

template <class C>
__device__ void consume(Shared<C>& shared, const TensorMap& d_map, const Arguments& args, SchedulerOf<C> schedule) {
  constexpr int kAccumulators = C::kPartN / 2;
  const Thread<C> thread;
  float total[C::kParts][kAccumulators];
  TileBias<C> biases[C::kParts];
  ProductBuffer<C> buffers[C::kNumProductBuffers];
  auto finished = TileCoord<C>::none();  // of a tile that is in `total`, to be stored
  int num_activated = 0;
  // Above 0: the next stage will be filled again. Only such ones are released, so that no signal is on its
  // way to a CTA that has left; so none waits for the others at the end.
  // A grouped GEMM does not know them.
  int refills = 1;
  if constexpr (!C::kGrouped) refills = schedule.num_stages() - C::kStages;

  const auto begin_batch = [&](int i, int part) __attribute__((always_inline)) {
    buffers[i].begin(shared, schedule, part, thread);
    if (part == C::kParts - 1) schedule.next_stage();
  };
  const auto finish_batch = [&](int i, int part) __attribute__((always_inline)) {
    const bool ends_stage = part == C::kParts - 1;
    buffers[i].finish(total[part], shared, part, ends_stage && refills > 0, thread);
    if (ends_stage && !C::kGrouped) --refills;
  };
  const auto begin_part = [&](int part) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) total[part][i] = 0.0f;
    if constexpr (C::kSplitK == 1) biases[part].load(args, schedule.coord, part * C::kPartN, thread);
  };
  const auto store_part = [&](int part, Staging staging) {
    if constexpr (C::kSplitK == 1 && !C::kGateUp) {
      store<C>(total[part], staging, d_map, args, finished, part * C::kPartN, biases[part], thread);
    }
    begin_part(part);
  };
  // The tile before this one leaves while the tensor cores compute the first products; gate and up together.
  const auto store_finished = [&](int part) __attribute__((always_inline)) {
    if (finished.is_none()) return;
    if constexpr (C::kGateUp) {
      if (part == 0) swiglu_epilogue<C>(total, shared, d_map, args, finished, num_activated++, thread);
      begin_part(part);
    } else {
      store_part(part, output_staging(shared, thread));
    }
  };

#pragma unroll
  for (int part = 0; part < C::kParts; ++part) begin_part(part);
  for (; !schedule.done(); schedule.next_tile()) {
    if constexpr (C::kStoresFirst) {
      store_finished(0);
      buffers[0].forget();
    }
    if (C::kHasShortTiles && !thread.has_rows(schedule.coord)) {  // the group ends before them
#pragma unroll
      for (int part = 0; part < (C::kStoresFirst ? 0 : C::kParts); ++part) store_finished(part);
      finished = TileCoord<C>::none();
      skip_tile(shared, schedule, thread);
      continue;
    }
    if constexpr (C::kNumProductBuffers == 1) {
      const auto compute_stage = [&](bool is_first) __attribute__((always_inline)) {
#pragma unroll
        for (int part = 0; part < C::kParts; ++part) {
          begin_batch(0, part);
          if (is_first && !C::kStoresFirst) store_finished(part);
          wgmma_wait<0>();
          finish_batch(0, part);
        }
      };
      compute_stage(true);
#pragma unroll(C::kGrouped ? 1 : 4)  // four: descriptors are ready earlier; one: less code, see CONTRIBUTING.md
      for (int k = schedule.k_begin + 1; k < schedule.k_end; ++k) compute_stage(false);
    } else {
      // Batches 0 and 1 in turn, which are the parts of a stage or whole stages; one is always under way:
      //   begin 0 | begin 1, finish 0 | begin 0, finish 1 | ... | finish the last
      const auto part_of = [](int i) { return C::kParts == 1 ? 0 : i; };
      const auto turn = [&](int i) __attribute__((always_inline)) {
        begin_batch(i, part_of(i));
        wgmma_wait<1>();
        finish_batch(1 - i, part_of(1 - i));
      };
      begin_batch(0, 0);
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) store_finished(part);
      int left = (schedule.k_end - schedule.k_begin) * C::kParts - 1;  // still to begin
#pragma unroll 1
      for (; left >= 2; left -= 2) turn(1), turn(0);
      const auto end = [&](int i) __attribute__((always_inline)) {
        wgmma_wait<0>();
        fence_cta();  // scales may still be on their way to registers: no batch was begun since
        finish_batch(i, part_of(i));
      };
      if (left > 0) turn(1), end(1);
      else end(0);
    }
    finished = schedule.coord;
  }

  if constexpr (C::kGateUp) {
    store_finished(0);
  } else if constexpr (C::kSplitK == 1) {
#pragma unroll
    for (int part = 0; part < C::kParts; ++part)
      if (!finished.is_none())
        store_part(part, part == 0 ? output_staging(shared, thread) : stage_staging(shared, part, thread));
  } else {
    const int slice = cluster_rank() / C::kMulticast;
    if (slice < C::kOwners) biases[0].load(args, finished, slice * C::kStoreN, thread);
    float sum[C::kStoreN / 2];
    reduce_split_k<C>(sum, reinterpret_cast<float(&)[C::kWgmmaN / 2]>(total), shared, slice, thread);
    if (slice < C::kOwners)
      store<C>(sum, output_staging(shared, thread), d_map, args, finished, slice * C::kStoreN, biases[0], thread);
  }
  if (thread.index == 0) tma_store_wait_read();
}

// Formula   d = sum over k-blocks of (a_scale * b_scale) * (a b^T), each k-block summed by WGMMA.
// Grid      persistent: clusters of kTogether x kSplitK CTAs walk over the tiles; if sums must meet
//           (kSplitK > 1), each cluster computes one tile. It does not depend on how many tokens groups have.
// Shared    kStages stages of both operands and their scales; the tile on its way out; the inbox for sums
//           of other CTAs; magnitudes of other warps or of the peer.
// Barriers  full[stage]: the loading thread, the lanes of the scales' warp, and TMA's bytes;
//           empty[stage]: each math thread, and each math warp of the CTAs that share an operand;
//           delivered: the sums of other CTAs for this one's slice are in its inbox, or the peer's magnitudes;
//           tiles: a lane of the scheduler; all threads that follow it; where tiles are taken from a counter, the
//           loading warp that asks for the next one, and CTAs of a cluster that tell each other which it is.
// Alignment a, b, d and the token scales [K/128, M]: address, row and matrix pitch multiples of 16 B (TMA).
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    gemm_kernel(const __grid_constant__ TokenMaps<C> token_maps, const __grid_constant__ TensorMap token_scale_map,
                const __grid_constant__ WeightMaps<C> weight_maps, const __grid_constant__ TensorMap d_map,
                const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<C>*>(memory);
  static_assert(sizeof(Shared<C>) == C::kSharedBytes, "the host counts as the compiler does");
  // Registers follow the work: the loading warps need few of them.
  constexpr bool kMoveRegisters = C::kMathGroups > 1 && C::kCtasPerSm == 1;

  const int group = warp_uniform(threadIdx.x / kWarpgroup);
  const int warp = warp_uniform(threadIdx.x % kWarpgroup / kWarp), lane = threadIdx.x % kWarp;
  const bool loads = group == C::kMathGroups && warp == 0, loads_scales = group == C::kMathGroups && warp == 1;
  const bool schedules = C::kGrouped && group == C::kMathGroups && warp == 2;
  SchedulerOf<C> schedule(shared, args);
  ScaleProducer<C> scale_producer{args, lane};
  GroupedSchedulerOf<C> scheduler{args, lane};
  if (loads) {
    if (elect_one()) {
      for (int i = 0; i < C::kStages; ++i) {
        shared.full[i].init(1 + kWarp);
        shared.empty[i].init(C::kMathGroups * (kWarpgroup + (C::kMulticast - 1) * 4));
      }
      shared.delivered.init(1);
      if constexpr (C::kGrouped) shared.tiles.init();
      if constexpr (C::kGateUp) init_magnitudes<C>(shared.magnitudes);
      fence_barrier_init();
    }
    __syncwarp();
  } else if (loads_scales && !C::kGrouped) {
    scale_producer.read(schedule);  // before the operands, behind which they would queue
  } else if (schedules) {
    scheduler.prepare();
  }
  Producer<C> producer{shared, token_maps, token_scale_map, weight_maps, elect_one()};
  // Before all else, for this is what everyone waits for; but where others write into this CTA's shared
  // memory from the start, they and it must have initialised their barriers, and where a scheduler says what
  // to load, it and they must meet.
  constexpr bool kLoadsAtOnce = C::kMulticast == 1 && !C::kGrouped;
  if (loads && kLoadsAtOnce) producer.fill(schedule, args.programmatic);
  if constexpr (C::kGrouped) {
    if (loads) producer.prefetch_expected(args);
  }
  __syncthreads();
  if constexpr (C::kTogether * C::kSplitK > 1) cluster_arrive();  // split only: `reduce_split_k` waits, where it sends
  if constexpr (C::kTogether > 1) cluster_wait();

  if (group == C::kMathGroups) {
    if constexpr (kMoveRegisters) give_registers<C::kLoadRegisters>();
    if (schedules) scheduler.run(shared);
    if (loads) {
      schedule.start();
      if (!kLoadsAtOnce) producer.fill(schedule, args.programmatic);
      producer.run(schedule);
    }
    if (loads_scales) {
      schedule.start();
      if (C::kGrouped && !schedule.done()) scale_producer.read(schedule);
      scale_producer.run(shared, schedule);
    }
  } else if (group == C::kRowGroups) {  // the tail's, if there is one
    if constexpr (C::kTail > 0) {
      give_registers<C::kTailRegisters>();
      schedule.start();
      consume_tail<C>(shared, args, schedule);
    }
  } else {
    if constexpr (kMoveRegisters) take_registers<C::kMathRegisters>();
    schedule.start();
    consume<C>(shared, d_map, args, schedule);
  }
}
