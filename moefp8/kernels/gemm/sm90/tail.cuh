// The tail: the tokens of a tile behind its rows, and the warpgroup that computes them.
//
// A group of tokens ends anywhere, and WGMMA computes 64 rows at a time, however few are left. So a math warpgroup of
// its own takes up to `tail` tokens more as columns, which come in eights. The weights, which are in shared memory for
// the others anyway, are its rows: twice 64 of them, of gate and up, or of down.
#pragma once
#include "epilogue/store.cuh"
#include "epilogue/gate_up.cuh"
#include "matrix.cuh"
#include "wgmma.cuh"

template <GemmConfig C>
struct Tail {
  static constexpr int kParts = C.tile_weights / 64, kSize = C.tail / 2;
  float total[kParts][kSize];

  // Adds a k-block, as `ProductBuffer` in consumer.cuh does.
  __device__ void add(Shared<C>& shared, const SchedulerOf<C>& schedule, const Thread<C>& thread) {
    const int stage = schedule.stage;
    const uint32_t weights = wgmma_descriptor_low(shared.weight_operand(stage, 0));
    const uint32_t tokens = wgmma_descriptor_low(shared.token_operand(stage, 0) + C.wgmma_m * kBlock);
    float products[kParts][kSize];
    shared.full[stage].wait(schedule.parity);
#pragma unroll
    for (int part = 0; part < kParts; ++part) pin_registers(products[part]);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kBlock / 32; ++i) {
        const uint32_t a = weights + part * 64 * kBlock / 16 + i * kDescriptorStepK, b = tokens + i * kDescriptorStepK;
        wgmma<C.tail>(products[part], wgmma_descriptor(a), wgmma_descriptor(b), i > 0);
      }
    }
    wgmma_commit();
    const float* token_scales = shared.tokens[stage].scales[0] + schedule.coord.scale_offset() + C.wgmma_m + thread.col;
    float scales[C.tail / 8][2], weight_scales[C.weight_scales];
#pragma unroll
    for (int i = 0; i < C.weight_scales; ++i) weight_scales[i] = shared.weights[stage].scales[0][i];
#pragma unroll
    for (int j = 0; j < C.tail / 8; ++j) scales[j][0] = token_scales[8 * j], scales[j][1] = token_scales[8 * j + 1];
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      pin_registers(products[part]);
      const float weight = weight_scales[C.weight_scales == 1 ? 0 : part];
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        total[part][i] = fmaf(scales[i / 4][i % 2] * weight, products[part][i], total[part][i]);
    }
    fence_cta();  // see `release`
    release(shared, stage, thread);
  }

  // Adds the bias of the 64 weights of a part.
  __device__ void add_bias(int part, const Arguments& args, const TileCoord<C>& coord, const Thread<C>& thread) {
    TileBias<C, true> bias;
    bias.load(bias_of_group(args, coord, C.gate_up && part == 1), args, coord, part * 64, thread);
    bias.add_to(total[part], thread);
  }
  // Stores the tail in BF16, as `store_tile` in epilogue/store.cuh does with swap_ab: a part is a box.
  __device__ void store(Shared<C>& shared, const Arguments& args, const TileCoord<C>& coord,
                        const Thread<C>& thread) const {
    constexpr int kBarrier = 1 + C.row_warpgroups, kGroups = C.tail / 8;
    named_barrier<kWarpgroup>(kBarrier);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int j = 0; j < kGroups; j += 2) {
        const int token = (j + thread.lane / 16) * 8 + thread.lane % 8, unit = thread.warp * 2 + thread.lane / 8 % 2;
        const uint32_t address =
            shared_address(shared.tail_output.tail[part]) + token * kBlock + (unit ^ token % 8) * 16;
        const float* v = total[part] + 4 * j;
        const auto packed = [&](int i) { return pack_bf16(v[2 * i], v[2 * i + 1]); };
        if (j + 1 < kGroups) store_matrices<true>(address, packed(0), packed(1), packed(2), packed(3));
        else store_matrices<true>(address, packed(0), packed(1));
      }
    }
    named_barrier<kWarpgroup>(kBarrier);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      store_rows<C, uint16_t, 64>(shared.tail_output.tail[part], args, coord, C.wgmma_m, C.tail,
                                              coord.weight(args, part * 64), thread.index);
    }
  }
};

template <GemmConfig C>
__device__ void consume_tail(Shared<C>& shared, const Arguments& args, SchedulerOf<C> schedule) {
  const Thread<C> thread;
  int num_activated = 0;
#pragma unroll 1
  for (; !schedule.done(); schedule.next_tile()) {
    if (!schedule.coord.has_tail()) {
      skip_tile(shared, schedule, thread);
      continue;
    }
    Tail<C> tail = {};
#pragma unroll 1
    for (int k = 0; k < schedule.k_end; ++k, schedule.next_stage()) tail.add(shared, schedule, thread);
#pragma unroll
    for (int part = 0; part < Tail<C>::kParts; ++part) tail.add_bias(part, args, schedule.coord, thread);
    if constexpr (C.gate_up) {
      if constexpr (C.saves_gate_up)
        save_gate_up<true>(tail.total[0], tail.total[1], args, schedule.coord, thread);
      activate<C.activation>(tail.total[0], tail.total[1], args.gate_up.activation);
      gate_up_epilogue_columns(tail.total[0], shared, args, schedule.coord, num_activated++, thread);
    } else {
      tail.store(shared, args, schedule.coord, thread);
    }
  }
}
