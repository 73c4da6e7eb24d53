// How a tile of the dense GEMM leaves: sums over the CTAs that divided K, bias, BF16, TMA.
#pragma once
#include "gemm_tile.cuh"
#include "matrix.cuh"
#include "tma.cuh"

template <Bias kBias>
__device__ float load_bias(const void* bias, int i, int size) {
  if (i >= size) return 0.0f;
  if constexpr (kBias == Bias::kFloat) return static_cast<const float*>(bias)[i];
  const uint16_t bits = static_cast<const uint16_t*>(bias)[i];
  if constexpr (kBias == Bias::kBFloat16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Writes 64 rows x kStoreCols of the output, whose first element is (row, col), through shared memory.
template <class C>
__device__ void store(float (&total)[C::kStoreCols / 2], Shared<C>& shared, const TensorMap& d_map,
                      const Arguments& args, int row, int col, const Thread& thread) {
  constexpr int kGroups = C::kStoreCols / 8;
  uint8_t* output = shared.output[thread.group][0];
  if (thread.index == 0) tma_store_wait_read();  // what was in `output` has left
  named_barrier<kWarpgroup>(1 + thread.group);
  // Four matrices at a time: rows 0-7 and 8-15 of two groups of 8 columns. Lane l addresses row l % 8
  // of matrix l / 8; where weights are the rows, the matrices are transposed on the way.
  constexpr int kPitch = C::kBoxCols * 2, kUnits = kPitch / 16;
#pragma unroll
  for (int j = 0; j < kGroups; j += 2) {
    if constexpr (C::kBias != Bias::kNone) {  // here, since all at once would need too many registers
#pragma unroll
      for (int i = 4 * j; i < 4 * (j + 2 < kGroups ? j + 2 : kGroups); ++i) {
        const int weight = C::kWeightsAreRows ? row + thread.row % 64 + i / 2 % 2 * 8
                                              : col + i / 4 * 8 + thread.col + i % 2;
        total[i] += load_bias<C::kBias>(args.bias, weight, args.num_weights);
      }
    }
    const int group = j + thread.lane / 16, half = thread.lane / 8 % 2;
    const int y = C::kWeightsAreRows ? group * 8 + thread.lane % 8 : thread.warp * 16 + half * 8 + thread.lane % 8;
    const int x = C::kWeightsAreRows ? thread.warp * 16 + half * 8 : group * 8;
    const int unit = x % C::kBoxCols / 8 ^ y * kPitch / 128 % kUnits;  // the swizzle
    const uint32_t address = shared_address(output) + x / C::kBoxCols * C::kBoxBytes + y * kPitch + unit * 16;
    const auto packed = [&](int i) { return pack_bf16(total[4 * j + 2 * i], total[4 * j + 2 * i + 1]); };
    if (j + 1 < kGroups) {
      store_matrices<C::kWeightsAreRows>(address, packed(0), packed(1), packed(2), packed(3));
    } else {
      store_matrices<C::kWeightsAreRows>(address, packed(0), packed(1));
    }
  }
  fence_for_async();
  named_barrier<kWarpgroup>(1 + thread.group);
  if (thread.index == 0) {
#pragma unroll
    for (int i = 0; i < C::kBoxes; ++i) {
      const int x = C::kWeightsAreRows ? row : col + i * C::kBoxCols, y = C::kWeightsAreRows ? col : row;
      tma_store(d_map, output + i * C::kBoxBytes, x, y);
    }
    tma_store_commit();
  }
}

// Sums over the CTAs that divided K. Each owns a slice of the columns, and gets it from all others.
template <class C>
__device__ void reduce(float (&sum)[C::kStoreCols / 2], const float (&total)[C::kCols / 2], Shared<C>& shared,
                       const Thread& thread) {
  constexpr int kVectors = C::kStoreCols / 8, kMathThreads = C::kMathGroups * kWarpgroup;
  constexpr int kBytes = kVectors * kMathThreads * 16;  // from one CTA to another
  static_assert(C::kSplit * kBytes <= sizeof(shared.rows) + sizeof(shared.cols), "the inbox fits into the stages");
  const int rank = cluster_rank(), split = rank / C::kShare, share = rank % C::kShare;
  float4* inbox = reinterpret_cast<float4*>(&shared.rows[0][0][0]);  // [kSplit][kVectors][kMathThreads]
  shared.inbox.arrive_and_expect(threadIdx.x == 0, split < C::kOwners ? (C::kSplit - 1) * kBytes : 0);
  cluster_barrier();  // all stages are free
#pragma unroll
  for (int owner = 0; owner < C::kOwners; ++owner) {
    if (owner == split) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      store_in_cluster(inbox + (split * kVectors + i) * kMathThreads + threadIdx.x, shared.inbox,
                       owner * C::kShare + share, total + (owner * kVectors + i) * 4);
    }
  }
  shared.inbox.wait(0);
#pragma unroll
  for (int owner = 0; owner < C::kOwners; ++owner) {  // unrolled, so that registers have constant indices
    if (owner != split) continue;
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) sum[i] = total[owner * kVectors * 4 + i];
  }
  if (split >= C::kOwners) return;
#pragma unroll
  for (int other = 1; other < C::kSplit; ++other) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 v = inbox[((split + other) % C::kSplit * kVectors + i) * kMathThreads + threadIdx.x];
      sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
    }
  }
}
