// How a tile leaves: sums over the CTAs that divided K, bias, BF16, TMA.
#pragma once
#include "tile.cuh"
#include "matrix.cuh"
#include "tma.cuh"

// The bias of what a thread stores of a tile, loaded long before: not yet numbers, since who converts must wait.
// Where weights are columns, the thread adds two of every 8, but its lane keeps one of every kSpan, which lie in
// one piece. Shuffles bring the others, for which registers would not suffice.
template <class C>
struct TileBias {
  static constexpr bool kAny = C::kBias != Bias::kNone;
  static constexpr int kSpan = gcd(C::kStoreN, kWarp);
  static constexpr int kLoads = C::kSwapAb ? 2 : C::kStoreN / kSpan;
  uint32_t bits[kLoads];

  __device__ void load(const Arguments& args, const TileCoord<C>& coord, int first_col, const Thread<C>& thread) {
    if constexpr (!kAny) return;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int weight = C::kSwapAb ? thread.row % 64 + i * 8 : thread.lane % kSpan;
      asm volatile("" : "+r"(weight));  // no formula any more, or all addresses would be formed ahead of all loads
      weight += coord.weight(args, C::kSwapAb ? thread.group * 64 : first_col + i * kSpan);
      const uint32_t at = min(weight, args.num_weights - 1);  // beyond it, nothing is stored
      if constexpr (C::kBias == Bias::kFloat) bits[i] = static_cast<const uint32_t*>(args.bias)[at];
      else bits[i] = static_cast<const uint16_t*>(args.bias)[at];
    }
  }
  __device__ float value(int i) const {
    if constexpr (C::kBias == Bias::kFloat) return __uint_as_float(bits[i]);
    if constexpr (C::kBias == Bias::kBFloat16) return __uint_as_float(bits[i] << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits[i])));
    return value;
  }
  __device__ void add_to(float (&total)[C::kStoreN / 2], const Thread<C>& thread) const {
    if constexpr (!kAny) return;
#pragma unroll
    for (int i = 0; i < C::kStoreN / 2; ++i) {
      const int col = i / 4 * 8;
      if constexpr (C::kSwapAb) {
        total[i] += value(i / 2 % 2);
      } else if (i % 4 < 2) {
        const float bias = __shfl_sync(~0u, value(col / kSpan), col % kSpan + thread.col + i % 2);
        total[i] += bias, total[i + 2] += bias;
      }
    }
  }
};

// Where boxes of output pass through shared memory: in slices of kSlice bytes, `pitch` bytes apart.
constexpr int kSlice = 64 * kBlock;  // what a warpgroup's rows take of a k-block
struct Staging {
  uint8_t* first;
  int pitch;

  template <class C>
  __device__ uint8_t* box(int i) const {
    constexpr int kInSlice = C::kBoxes == 1 ? 1 : kSlice / C::kBoxBytes;
    return first + i / kInSlice * pitch + i % kInSlice * C::kBoxBytes;
  }
};

// The memory for it; what was there may still be leaving.
template <class C>
__device__ Staging output_staging(Shared<C>& shared, const Thread<C>& thread) {
  if (thread.index == 0) tma_store_wait_read();
  return {shared.output[thread.group][0], kSlice};
}
// Once nothing is loaded any more, the parts of the last tile need not wait for each other: the stages are
// free, and each warpgroup takes the rows that it alone has read.
template <class C>
__device__ Staging stage_staging(Shared<C>& shared, int part, const Thread<C>& thread) {
  constexpr int kSlices = ceil_div(C::kBoxes * C::kBoxBytes, kSlice);
  static_assert((C::kParts - 1) * kSlices <= C::kStages && (C::kParts == 1 || !C::kSwapAb));
  return {shared.rows[(part - 1) * kSlices][0] + thread.group * kSlice, sizeof(shared.rows[0])};
}

// Stores `size` tokens of a tile from `first` on, only those of the group, without TMA: kWidth elements from
// `first_weight` on, 16 bytes at a time, from a box as TMA would swizzle it.
template <class C, class Element, int kWidth, int kThreads>
__device__ void store_rows(const uint8_t* box, const Arguments& args, const TileCoord<C>& coord, int first, int size,
                           int first_weight, int thread) {
  constexpr int kPitch = kWidth * sizeof(Element), kUnits = kPitch / 16, kInUnit = 16 / sizeof(Element);
  const Groups& groups = args.groups;
  const int begin = max(coord.begin() - first, 0), end = min(coord.end() - first, size);
  auto* d = static_cast<Element*>(groups.d) + coord.matrix * groups.d_matrix_stride +
            (coord.first_token + first) * groups.d_row_stride;
#pragma unroll 1
  for (int unit = begin * kUnits + thread; unit < end * kUnits; unit += kThreads) {
    const int y = unit / kUnits, x = unit % kUnits, weight = first_weight + x * kInUnit;
    const uint4 v = *reinterpret_cast<const uint4*>(box + y * kPitch + (x ^ y * kPitch / 128 % kUnits) * 16);
    if (weight < args.num_weights) *reinterpret_cast<uint4*>(d + y * groups.d_row_stride + weight) = v;
  }
}

// As the TMA of `store`, where not all tokens are the group's: no other row is written.
template <class C>
__device__ void store_some(Staging staging, const Arguments& args, const TileCoord<C>& coord, int first_col, int first,
                           const Thread<C>& thread) {
#pragma unroll
  for (int box = 0; box < C::kBoxes; ++box) {
    const int col = C::kSwapAb ? thread.group * 64 : first_col + box * C::kBoxCols;
    store_rows<C, uint16_t, C::kBoxCols, kWarpgroup>(staging.box<C>(box), args, coord, first, C::kBoxRows,
                                                     coord.weight(args, col), thread.index);
  }
}

// Writes 64 rows of a tile of the output, kStoreN columns of it from `first_col` on, through shared memory.
template <class C>
__device__ void store(float (&total)[C::kStoreN / 2], Staging staging, const TensorMap& d_map,
                      const Arguments& args, const TileCoord<C>& coord, int first_col, const TileBias<C>& bias,
                      const Thread<C>& thread) {
  constexpr int kGroups = C::kStoreN / 8;
  bias.add_to(total, thread);
  named_barrier<kWarpgroup>(1 + thread.group);
  // Four matrices at a time: rows 0-7 and 8-15 of two groups of 8 columns. Lane l addresses row l % 8
  // of matrix l / 8; where weights are the rows, the matrices are transposed on the way.
  constexpr int kPitch = C::kBoxCols * 2, kUnits = kPitch / 16;
#pragma unroll
  for (int j = 0; j < kGroups; j += 2) {
    const int group = j + thread.lane / 16, half = thread.lane / 8 % 2;
    const int y = C::kSwapAb ? group * 8 + thread.lane % 8 : thread.warp * 16 + half * 8 + thread.lane % 8;
    const int x = C::kSwapAb ? thread.warp * 16 + half * 8 : group * 8;
    const int unit = x % C::kBoxCols / 8 ^ y * kPitch / 128 % kUnits;  // the swizzle
    const uint32_t address = shared_address(staging.box<C>(x / C::kBoxCols)) + y * kPitch + unit * 16;
    const auto packed = [&](int i) { return pack_bf16(total[4 * j + 2 * i], total[4 * j + 2 * i + 1]); };
    if (j + 1 < kGroups) {
      store_matrices<C::kSwapAb>(address, packed(0), packed(1), packed(2), packed(3));
    } else {
      store_matrices<C::kSwapAb>(address, packed(0), packed(1));
    }
  }
  const int first = C::kSwapAb ? first_col : thread.group * 64;  // of the tile's tokens
  const bool all = !C::kGrouped || (coord.begin() <= first && first + C::kBoxRows <= coord.end());
  fence_for_async();
  named_barrier<kWarpgroup>(1 + thread.group);
  if (C::kGrouped && !all) {
    store_some<C>(staging, args, coord, first_col, first, thread);
  } else if (thread.index == 0) {
#pragma unroll
    for (int i = 0; i < C::kBoxes; ++i) {
      const int weight = C::kSwapAb ? thread.group * 64 : first_col + i * C::kBoxCols;
      const Corner at{coord.weight(args, weight), coord.first_token + first, coord.matrix};
      tma_store<C::kDimensions>(d_map, staging.box<C>(i), at);
    }
    tma_store_commit();
  }
}

// Sums over the CTAs of the cluster that divided K. Each owns a slice of the columns, and gets it from all
// others; `slice` is the place of this one. The order of the sums is the same for all.
template <class C>
__device__ void reduce_split_k(float (&sum)[C::kStoreN / 2], const float (&total)[C::kWgmmaN / 2], Shared<C>& shared,
                       int slice, const Thread<C>& thread) {
  constexpr int kVectors = C::kStoreN / 8;
  constexpr int kBytes = (C::kSplitK - 1) * kVectors * C::kMathGroups * kWarpgroup * 16;
  const int share = cluster_rank() % C::kMulticast, column = thread.group * kWarpgroup + thread.index;
  if constexpr (C::kMulticast == 1) cluster_wait();  // the barriers of the others are ready
  shared.delivered.arrive_and_expect(column == 0, slice < C::kOwners ? kBytes : 0);
  float own[C::kStoreN / 2] = {};
#pragma unroll
  for (int owner = 0; owner < C::kOwners; ++owner) {  // unrolled, so that registers have constant indices
    const float* v = total + owner * kVectors * 4;
    if (owner == slice) {
#pragma unroll
      for (int i = 0; i < 4 * kVectors; ++i) own[i] = v[i];
      continue;
    }
    const int first = (slice - (slice > owner)) * kVectors;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      store_in_cluster(&shared.inbox[first + i][column], shared.delivered, owner * C::kMulticast + share, v + 4 * i);
  }
  if (slice >= C::kOwners) return;
  shared.delivered.wait(0);
#pragma unroll
  for (int i = 0; i < 4 * kVectors; ++i) sum[i] = 0.0f;
#pragma unroll
  for (int from = 0; from < C::kSplitK; ++from) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float4 v = make_float4(own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]);
      if (from != slice) v = shared.inbox[(from - (from > slice)) * kVectors + i][column];
      sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
    }
  }
}
