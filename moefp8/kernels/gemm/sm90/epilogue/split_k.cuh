// The CTAs of a cluster that divided K add up their sums, through distributed shared memory.
#pragma once
#include "pipeline.cuh"

// Each CTA owns a slice of the columns, the one with the index `slice`, and gets it from all others. The order of the
// sums does not depend on the slice.
template <GemmConfig C>
__device__ void reduce_split_k(float (&sum)[C.store_n / 2], const float (&total)[C.wgmma_n / 2], Shared<C>& shared,
                               int slice, const Thread<C>& thread) {
  constexpr int kVectors = C.store_n / 8;
  constexpr int kBytes = (C.split_k - 1) * kVectors * C.math_warpgroups * kWarpgroup * 16;
  const int column = thread.group * kWarpgroup + thread.index;
  cluster_wait();  // the barriers of the others are ready
  shared.delivered.arrive_and_expect(column == 0, slice < C.slice_owners ? kBytes : 0);
  float own[C.store_n / 2] = {};
#pragma unroll
  for (int owner = 0; owner < C.slice_owners; ++owner) {  // unrolled, so that registers have constant indices
    const float* v = total + owner * kVectors * 4;
    if (owner == slice) {
#pragma unroll
      for (int i = 0; i < 4 * kVectors; ++i) own[i] = v[i];
      continue;
    }
    const int first = (slice - (slice > owner)) * kVectors;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      store_in_cluster(&shared.inbox[first + i][column], shared.delivered, owner, v + 4 * i);
  }
  if (slice >= C.slice_owners) return;
  shared.delivered.wait(0);
#pragma unroll
  for (int i = 0; i < 4 * kVectors; ++i) sum[i] = 0.0f;
#pragma unroll
  for (int from = 0; from < C.split_k; ++from) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float4 v = make_float4(own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]);
      if (from != slice) v = shared.inbox[(from - (from > slice)) * kVectors + i][column];
      sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
    }
  }
}
