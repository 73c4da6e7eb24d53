// The math warpgroups: they multiply what is in a stage, promote the products, and hand finished tiles to the epilogue.
#pragma once
#include "epilogue/split_k.cuh"
#include "epilogue/store.cuh"
#include "epilogue/gate_up.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

// The scales of one k-block that this thread needs for all columns.
template <GemmConfig C>
struct Scales {
  float weight[C.swap_ab ? 1 : C.weight_scales];
  float token[2];  // the scales of its two rows, without swap_ab

  // is_half: the part is that of the warpgroup, and promoted as if it were the last one.
  template <bool is_half>
  __device__ void load(const Shared<C>& shared, int stage, int k_block, int part, int row, const Thread<C>& thread) {
    const float* weights = shared.weights[stage].scales[k_block];
    if constexpr (C.stacked) {
      weight[0] = weights[part];
    } else if constexpr (C.swap_ab) {
      weight[0] = weights[C.weight_scales == 1 ? 0 : TileCoord<C>::scale(thread.group * 64)];
    } else {
#pragma unroll
      for (int i = 0; i < C.weight_scales; ++i) weight[i] = weights[is_half && thread.group == 0 ? 0 : i];
      token[0] = shared.tokens[stage].scales[k_block][row];
      token[1] = shared.tokens[stage].scales[k_block][row + 8];
    }
  }
};

// The second level of accumulation: total += product * (token scale * weight scale). It says that product and sum are
// rounded once, since compilers form products ahead of a branch and only then add: bits would differ between kernels.
template <GemmConfig C>
__device__ void promote(float (&total)[C.part_n / 2], const float (&product)[C.part_n / 2], const Scales<C>& scales,
                        const float* token_scales, int part, const Thread<C>& thread) {
  float scale[2];
#pragma unroll
  for (int j = 0; j < C.part_n / 8; ++j) {
    const int col = (C.stacked ? 0 : part * C.part_n) + 8 * j;
    if constexpr (C.swap_ab) {  // one weight scale; two token scales for each 8 columns
      const float2 token = *reinterpret_cast<const float2*>(token_scales + col + thread.col);
      scale[0] = token.x * scales.weight[0], scale[1] = token.y * scales.weight[0];
    } else if (j == 0 || TileCoord<C>::begins_scale(col)) {  // two token scales; here the weight scale changes
      const float weight = scales.weight[TileCoord<C>::scale(col)];
      scale[0] = scales.token[0] * weight, scale[1] = scales.token[1] * weight;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      total[4 * j + i] = fmaf(scale[C.swap_ab ? i % 2 : i / 2], product[4 * j + i], total[4 * j + i]);
  }
}

// The same for all k-blocks of a stage.
template <GemmConfig C>
struct StageScales {
  Scales<C> of_k_block[C.k_blocks_per_stage];

  // Waits until the stage that `schedule` is at is loaded, and reads what a part needs.
  template <bool is_half>
  __device__ void load(Shared<C>& shared, const SchedulerOf<C>& schedule, int part, const Thread<C>& thread) {
    const int stage = schedule.stage;
    if (is_half || part == 0) shared.full[stage].wait(schedule.parity);  // the other parts are of the same stage
    const int row = thread.row - (is_half ? thread.group * 64 : 0) + schedule.coord.scale_offset();
#pragma unroll
    for (int d = 0; d < C.k_blocks_per_stage; ++d)
      of_k_block[d].template load<is_half>(shared, stage, d, part, row, thread);
  }
};

// What a warpgroup gives to the tensor cores at once, and where the products arrive: its rows of one stage times one
// part of the columns.
template <GemmConfig C>
struct ProductBuffer {
  float products[C.k_blocks_per_stage][C.part_n / 2];
  StageScales<C> scales;
  int stage;  // by the time that the products are promoted, the schedule has moved on

  // is_half: both warpgroups have the same 64 rows, and each a part of the columns.
  // next_scales: those of this stage, if they were read ahead.
  template <bool is_half = false>
  __device__ void begin(Shared<C>& shared, const SchedulerOf<C>& schedule, int part, const StageScales<C>& next_scales,
                        const Thread<C>& thread) {
    stage = schedule.stage;
    const int first_row = is_half ? 0 : thread.group * 64;
    const uint32_t rows = wgmma_descriptor_low(shared.rows[0][0] + first_row * kBlock) +
                          stage * (sizeof(shared.rows[0]) / 16);
    const uint32_t cols = wgmma_descriptor_low(shared.cols[0][0]) + stage * (sizeof(shared.cols[0]) / 16);
    if constexpr (C.reads_scales_ahead) scales = next_scales;
    else scales.template load<is_half>(shared, schedule, part, thread);
#pragma unroll
    for (int d = 0; d < C.k_blocks_per_stage; ++d) pin_registers(products[d]);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < C.k_blocks_per_stage; ++d) {
#pragma unroll
      for (int i = 0; i < kBlock / 32; ++i) {
        const int row = d * C.wgmma_m + (C.stacked ? part * C.outputs : 0);
        const int col = d * C.wgmma_n + (C.stacked ? 0 : part * C.part_n);
        const uint32_t a = rows + row * kBlock / 16 + i * kDescriptorStepK;
        const uint32_t b = cols + col * kBlock / 16 + i * kDescriptorStepK;
        wgmma<C.part_n>(products[d], wgmma_descriptor(a), wgmma_descriptor(b), i > 0);
      }
    }
    wgmma_commit();
  }
  // The registers of the products are free until `begin` overwrites them, which the compiler cannot know.
  __device__ void forget() {
#pragma unroll
    for (int d = 0; d < C.k_blocks_per_stage; ++d) {
#pragma unroll
      for (int i = 0; i < C.part_n / 2; ++i) products[d][i] = 0.0f;
    }
  }
  // Promotes the products, once the tensor cores are done with them.
  __device__ void finish(float (&total)[C.part_n / 2], Shared<C>& shared, int part, bool releases,
                         const Thread<C>& thread) {
#pragma unroll
    for (int d = 0; d < C.k_blocks_per_stage; ++d) pin_registers(products[d]);
    if (!C.swap_ab && releases) release(shared, stage, thread);
#pragma unroll
    for (int d = 0; d < C.k_blocks_per_stage; ++d)
      promote<C>(total, products[d], scales.of_k_block[d], shared.tokens[stage].scales[d], part, thread);
    if (C.swap_ab && releases) release(shared, stage, thread);
  }
};

// Computes the parts of a tile. `begin` and `finish` are given a buffer and a part. Behind the first products of a part,
// `store` stores what is in its place from the tile before. `read_scales` reads those of the stage that comes next.
template <GemmConfig C, int kParts, class ReadScales, class Begin, class Finish, class Store>
__device__ __forceinline__ void compute_tile(const SchedulerOf<C>& schedule, ReadScales read_scales, Begin begin,
                                             Finish finish, Store store) {
  static_assert(kParts <= 2);
  if constexpr (C.reads_scales_ahead) {
    // What the warpgroup can do while the tensor cores have its products, it does then: it waits for the next stage,
    // reads its scales, and goes round the loop. Between two products there is a promotion and nothing else.
    const auto turn = [&](int part) __attribute__((always_inline)) {
      wgmma_wait<0>();
      finish(0, (part + kParts - 1) % kParts);
      begin(0, part);
    };
    read_scales();
    begin(0, 0);
    store(0);
#pragma unroll
    for (int part = 1; part < kParts; ++part) turn(part), store(part);
#pragma unroll 1
    for (int k = schedule.k_begin + 1; k < schedule.k_end; ++k) {
      read_scales();
#pragma unroll
      for (int part = 0; part < kParts; ++part) turn(part);
    }
    wgmma_wait<0>();
    finish(0, kParts - 1);
  } else if constexpr (C.num_product_buffers == 1) {
    const auto compute_part = [&](int part, bool is_first) __attribute__((always_inline)) {
      begin(0, part);
      if (is_first) store(part);
      wgmma_wait<0>();
      finish(0, part);
    };
    const auto compute_stage = [&](bool is_first) __attribute__((always_inline)) {
      if constexpr (kParts == 1) {
        compute_part(0, is_first);
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) compute_part(part, is_first);
      }
    };
    compute_stage(true);
    // Four: descriptors are ready earlier; one: less code, see docs/design/gemm.md.
#pragma unroll(C.grouped ? 1 : 4)
    for (int k = schedule.k_begin + 1; k < schedule.k_end; ++k) compute_stage(false);
  } else {
    // Buffers 0 and 1 take turns. Their products are the parts of a stage, or whole stages; one is always under way:
    //   begin 0 | begin 1, finish 0 | begin 0, finish 1 | ... | finish the last
    const auto part_of = [](int buffer) { return kParts == 1 ? 0 : buffer; };
    const auto turn = [&](int i) __attribute__((always_inline)) {
      begin(i, part_of(i));
      wgmma_wait<1>();
      finish(1 - i, part_of(1 - i));
    };
    begin(0, 0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) store(part);
    int left = (schedule.k_end - schedule.k_begin) * kParts - 1;  // still to begin
#pragma unroll 1
    for (; left >= 2; left -= 2) turn(1), turn(0);
    const auto end = [&](int i) __attribute__((always_inline)) {
      wgmma_wait<0>();
      fence_cta();  // scales may still be on their way to registers: no product was begun since
      finish(i, part_of(i));
    };
    if (left > 0) turn(1), end(1);
    else end(0);
  }
}

// The biases of a tile: of each part, or of gate and up. A lambda in `consume` in place of `load` would change the
// machine code of all kernels without biases.
template <GemmConfig C>
struct TileBiases {
  TileBias<C> parts[C.parts];
  GateUpBias<C> gate_up;

  __device__ void load(int part, const Arguments& args, const TileCoord<C>& coord, const Thread<C>& thread) {
    if constexpr (C.gate_up) {
      if (part == 0) gate_up.load(args, coord, thread);
    } else {
      const int first = C.swap_ab ? thread.group * 64 : part * C.part_n;
      parts[part].load(bias_of_group(args, coord), args, coord, first, thread);
    }
  }
};

// One math warpgroup, other than the tail's. A finished tile stays in `total` while the first products of the next one
// are computed; only then the epilogue stores it.
template <GemmConfig C>
__device__ void consume(Shared<C>& shared, const TensorMap& d_map, const Arguments& args, SchedulerOf<C> schedule) {
  const Thread<C> thread;
  float total[C.parts][C.part_n / 2];
  TileBiases<C> bias;
  ProductBuffer<C> buffers[C.num_product_buffers];
  StageScales<C> next_scales;
  auto finished = TileCoord<C>::none();  // the tile that is in `total` and will be stored
  int num_epilogues = 0;
  // It is above 0 while the next stage will be filled again. Only such stages are released, so no signal is on its way
  // to a CTA that has left, and none has to wait for the others at the end. A grouped GEMM does not know the number.
  int refills = 1;
  if constexpr (!C.grouped) refills = schedule.num_stages() - C.stages;

  const auto read_scales = [&] { next_scales.template load<false>(shared, schedule, 0, thread); };
  const auto begin = [&](int buffer, int part) __attribute__((always_inline)) {
    buffers[buffer].begin(shared, schedule, part, next_scales, thread);
    if (part == C.parts - 1) schedule.next_stage();
  };
  const auto finish = [&](int buffer, int part) __attribute__((always_inline)) {
    const bool ends_stage = part == C.parts - 1;
    buffers[buffer].finish(total[part], shared, part, ends_stage && refills > 0, thread);
    if (ends_stage && !C.grouped) --refills;
  };
  const auto start_part = [&](int part) {
#pragma unroll
    for (int i = 0; i < C.part_n / 2; ++i) total[part][i] = 0.0f;
    if constexpr (C.split_k == 1) bias.load(part, args, schedule.coord, thread);
  };
  const auto store_part = [&](int part, Staging staging) {
    if constexpr (C.split_k == 1 && !C.gate_up)
      store_tile<C>(total[part], staging, d_map, args, finished, part * C.part_n, bias.parts[part], thread);
    start_part(part);
  };
  const auto store_finished = [&](int part) __attribute__((always_inline)) {
    if (finished.is_none()) {
      // What is there may be of a tile that was skipped.
      if constexpr (C.grouped) bias.load(part, args, schedule.coord, thread);
      return;
    }
    if constexpr (C.gate_up) {  // gate and up leave together
      if (part == 0) gate_up_epilogue<C>(total, shared, d_map, args, finished, num_epilogues++, bias.gate_up, thread);
      start_part(part);
    } else {
      store_part(part, output_staging(shared, thread));
    }
  };

#pragma unroll
  for (int part = 0; part < C.parts; ++part) start_part(part);
  for (; !schedule.done() && !schedule.coord.is_half(); schedule.next_tile()) {
    if constexpr (C.stores_first) {
#pragma unroll
      for (int part = 0; part < C.parts; ++part) store_finished(part);
      buffers[0].forget();
    }
    if (C.has_short_tiles && !thread.has_rows(schedule.coord)) {  // the group ends before its rows
#pragma unroll
      for (int part = 0; part < (C.stores_first ? 0 : C.parts); ++part) store_finished(part);
      finished = TileCoord<C>::none();
      skip_tile(shared, schedule, thread);
      continue;
    }
    compute_tile<C, C.parts>(schedule, read_scales, begin, finish, [&](int part) __attribute__((always_inline)) {
      if (!C.stores_first) store_finished(part);
    });
    finished = schedule.coord;
  }

  if constexpr (C.halves_tiles) {
    if (!schedule.done()) {  // half a tile comes last; this warpgroup has the part `thread.group` of it
      const int first_col = thread.group * C.part_n;
      const auto read_scales_half = [&] { next_scales.template load<true>(shared, schedule, thread.group, thread); };
      const auto begin_half = [&](int buffer, int) __attribute__((always_inline)) {
        buffers[buffer].template begin<true>(shared, schedule, thread.group, next_scales, thread);
        schedule.next_stage();
      };
      const auto finish_half = [&](int buffer, int) __attribute__((always_inline)) {
        buffers[buffer].finish(total[0], shared, C.parts - 1, refills > 0, thread);
        --refills;
      };
      const auto store_whole = [&](int) __attribute__((always_inline)) {
#pragma unroll
        for (int part = 0; part < C.parts; ++part) store_finished(part);
        bias.parts[0].load(args.bias, args, schedule.coord, first_col, thread);
      };
      compute_tile<C, 1>(schedule, read_scales_half, begin_half, finish_half, store_whole);
      store_tile<C>(total[0], output_staging(shared, thread), d_map, args, schedule.coord, first_col, bias.parts[0],
                    thread);
      finished = TileCoord<C>::none();
    }
  }

  if constexpr (C.gate_up) {
    store_finished(0);
  } else if constexpr (C.split_k == 1) {
#pragma unroll
    for (int part = 0; part < C.parts; ++part)
      if (!finished.is_none())
        store_part(part, part == 0 ? output_staging(shared, thread) : stage_staging(shared, part, thread));
  } else {
    const int slice = cluster_rank();
    const int first = C.swap_ab ? thread.group * 64 : slice * C.store_n;
    if (slice < C.slice_owners) bias.parts[0].load(args.bias, args, finished, first, thread);
    float sum[C.store_n / 2];
    reduce_split_k<C>(sum, total[0], shared, slice, thread);
    if (slice < C.slice_owners)
      store_tile<C>(sum, output_staging(shared, thread), d_map, args, finished, slice * C.store_n, bias.parts[0],
                    thread);
  }
  if (thread.index == 0) tma_store_wait_read();
}
