// The tokens of a tile behind its rows.
//
// A group of tokens ends anywhere, and WGMMA computes 64 rows at a time, however few are left. So a math warpgroup of
// its own takes up to kTail tokens more as columns, which come in eights. The weights, which are in shared memory for
// the others anyway, are its rows: twice 64 of them, of gate and up, or of down.
#pragma once
#include "gemm_activation.cuh"
#include "gemm_output.cuh"
#include "gemm_tile.cuh"
#include "matrix.cuh"
#include "wgmma.cuh"

template <class C>
struct Tail {
  static constexpr int kParts = C::kWeights / 64, kSize = C::kTail / 2;
  float total[kParts][kSize];

  // Adds a k-block, as `Batch` in gemm.cu does.
  __device__ void add(Shared<C>& shared, const WalkOf<C>& walk, const Thread<C>& thread) {
    const int stage = walk.stage;
    const uint32_t weights = wgmma_descriptor_low(shared.weight_operand(stage, 0));
    const uint32_t tokens = wgmma_descriptor_low(shared.token_operand(stage, 0) + C::kRows * kBlock);
    float products[kParts][kSize];
    shared.full[stage].wait(walk.parity);
#pragma unroll
    for (int part = 0; part < kParts; ++part) pin_registers(products[part]);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kBlock / 32; ++i) {
        const uint32_t a = weights + part * 64 * kBlock / 16 + i * kDescriptorStepK, b = tokens + i * kDescriptorStepK;
        wgmma<C::kTail>(products[part], wgmma_descriptor(a), wgmma_descriptor(b), i > 0);
      }
    }
    wgmma_commit();
    const float* token_scales = shared.tokens[stage].scales[0] + walk.place.scale_offset() + C::kRows + thread.col;
    const float* weight_scales = shared.weights[stage].scales[0];
    float scales[C::kTail / 8][2];
#pragma unroll
    for (int j = 0; j < C::kTail / 8; ++j) scales[j][0] = token_scales[8 * j], scales[j][1] = token_scales[8 * j + 1];
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      pin_registers(products[part]);
      const float weight = weight_scales[C::kWeightScales == 1 ? 0 : part];
#pragma unroll
      for (int i = 0; i < kSize; ++i) total[part][i] += scales[i / 4][i % 2] * weight * products[part][i];
    }
    fence_cta();  // see `release` in gemm.cu
    shared.empty[stage].arrive();
  }

  // In BF16, through shared memory.
  __device__ void store(Shared<C>& shared, const Arguments& args, const Place<C>& place, const Thread<C>& thread) const {
    constexpr int kBarrier = 1 + C::kRowGroups, kUnits = C::kWeights / 8;  // of 16 bytes in a token
    named_barrier<kWarpgroup>(kBarrier);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      // As `store` in gemm_output.cuh: rows 0-7 and 8-15 of two groups of 8 columns, transposed.
#pragma unroll
      for (int j = 0; j < C::kTail / 8; j += 2) {
        const int token = (j + thread.lane / 16) * 8 + thread.lane % 8;
        const int unit = (part * 64 + thread.warp * 16) / 8 + thread.lane / 8 % 2;
        const float* v = total[part] + 4 * j;
        const uint32_t address = shared_address(shared.tail_output.tail[token]) + (unit ^ token % 8) * 16;
        const auto packed = [&](int i) { return pack_bf16(v[2 * i], v[2 * i + 1]); };
        if (j + 1 < C::kTail / 8) store_matrices<true>(address, packed(0), packed(1), packed(2), packed(3));
        else store_matrices<true>(address, packed(0), packed(1));
      }
    }
    named_barrier<kWarpgroup>(kBarrier);
    const int begin = max(place.begin() - C::kRows, 0), end = place.end() - C::kRows, first_weight = place.weight(args, 0);
    auto* d = static_cast<uint16_t*>(args.groups.d) + place.matrix * args.groups.d_matrix_stride;
#pragma unroll 1
    for (int i = begin * kUnits + thread.index; i < end * kUnits; i += kWarpgroup) {
      const int token = i / kUnits, unit = i % kUnits, weight = first_weight + unit * 8;
      const uint4 v = *reinterpret_cast<const uint4*>(shared.tail_output.tail[token] + (unit ^ token % 8) * 16);
      const int64_t row = place.first_token + C::kRows + token;
      if (weight < args.num_weights) *reinterpret_cast<uint4*>(d + row * args.groups.d_row_stride + weight) = v;
    }
  }
};

template <class C>
__device__ void multiply_tail(Shared<C>& shared, const Arguments& args, WalkOf<C> walk) {
  const Thread<C> thread;
  int num_activated = 0;
#pragma unroll 1
  for (; !walk.done(); walk.next_tile()) {
    if (!walk.place.has_tail()) {
#pragma unroll 1
      for (int k = 0; k < walk.k_end; ++k, walk.next_stage()) {
        shared.full[walk.stage].wait(walk.parity);
        shared.empty[walk.stage].arrive();
      }
      continue;
    }
    Tail<C> tail = {};
#pragma unroll 1
    for (int k = 0; k < walk.k_end; ++k, walk.next_stage()) tail.add(shared, walk, thread);
    if constexpr (C::kGateUp) {
      swiglu(tail.total[0], tail.total[1], args.activation.limit);
      activate_columns(tail.total[0], shared, args, walk.place, num_activated++, thread);
    } else {
      tail.store(shared, args, walk.place, thread);
    }
  }
}
