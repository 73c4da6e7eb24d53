// The epilogue of a plain tile: bias, BF16, TMA.
#pragma once
#include "matrix.cuh"
#include "pipeline.cuh"
#include "tma.cuh"

// The bias of what a thread has of a tile. It is loaded long before it is added, and kept as bits, since converting it
// would wait for it.
// - Weights are rows: 64 of them, of which the thread has two.
// - Weights are columns, kWeights of them: the thread adds two of every 8, but its lane keeps one of every kSpan, which
//   are stored in one piece. Shuffles bring the others, since registers would not suffice for them.
template <GemmConfig C, bool kAsRows = C.swap_ab, int kWeights = C.store_n>
struct TileBias {
  static constexpr bool kAny = C.bias != Bias::kNone;
  static constexpr int kSpan = gcd(kWeights, kWarp);
  static constexpr int kLoads = kAsRows ? 2 : kWeights / kSpan;
  uint32_t bits[kLoads];

  // bias: the first of the group's num_weights. first: where the weights begin in the tile.
  __device__ void load(const void* bias, const Arguments& args, const TileCoord<C>& coord, int first,
                       const Thread<C>& thread) {
    if constexpr (!kAny) return;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int weight = kAsRows ? thread.row % 64 + i * 8 : thread.lane % kSpan;
      asm volatile("" : "+r"(weight));  // else the compiler forms all addresses ahead of all loads
      weight += coord.weight(args, kAsRows ? first : first + i * kSpan);
      const uint32_t at = min(weight, args.num_weights - 1);
      if constexpr (C.bias == Bias::kFloat) bits[i] = static_cast<const uint32_t*>(bias)[at];
      else bits[i] = static_cast<const uint16_t*>(bias)[at];
      // Nothing is stored after the last weight, but of gate and up it counts for the scale.
      if (C.gate_up && weight >= args.num_weights) bits[i] = 0;
    }
  }
  __device__ float value(int i) const {
    if constexpr (C.bias == Bias::kFloat) return __uint_as_float(bits[i]);
    if constexpr (C.bias == Bias::kBFloat16) return __uint_as_float(bits[i] << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits[i])));
    return value;
  }
  template <int kSize>
  __device__ void add_to(float (&total)[kSize], const Thread<C>& thread) const {
    if constexpr (!kAny) return;
    static_assert(kAsRows || kSize == kWeights / 2);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int col = i / 4 * 8;
      if constexpr (kAsRows) {
        total[i] += value(i / 2 % 2);
      } else if (i % 4 < 2) {
        const float bias = __shfl_sync(~0u, value(col / kSpan), col % kSpan + thread.col + i % 2);
        total[i] += bias, total[i + 2] += bias;
      }
    }
  }
};

// The bias of a tile's group: [num_weights]. is_up: that of up, which follows gate's.
template <GemmConfig C>
__device__ const void* bias_of_group(const Arguments& args, const TileCoord<C>& coord, bool is_up = false) {
  if constexpr (!C.grouped) return args.bias;
  const int64_t row = C.gate_up ? 2 * coord.group + is_up : coord.group;
  return static_cast<const uint8_t*>(args.bias) + row * args.num_weights * (C.bias == Bias::kFloat ? 4 : 2);
}

// Boxes of output pass through shared memory here, in slices of kSlice bytes that are `pitch` bytes apart.
constexpr int kSlice = 64 * kBlock;  // what a warpgroup's rows take of a k-block
struct Staging {
  uint8_t* first;
  int pitch;

  template <GemmConfig C>
  __device__ uint8_t* box(int i) const {
    constexpr int kInSlice = C.store_boxes == 1 ? 1 : kSlice / C.store_box_bytes;
    return first + i / kInSlice * pitch + i % kInSlice * C.store_box_bytes;
  }
};

// Waits until what was there has left.
template <GemmConfig C>
__device__ Staging output_staging(Shared<C>& shared, const Thread<C>& thread) {
  if (thread.index == 0) tma_store_wait_read();
  return {shared.output[thread.group][0], kSlice};
}
// Once nothing is loaded any more, the parts of the last tile need not wait for each other: the stages are
// free, and each warpgroup takes the rows that it alone has read.
template <GemmConfig C>
__device__ Staging stage_staging(Shared<C>& shared, int part, const Thread<C>& thread) {
  constexpr int kSlices = ceil_div(C.store_boxes * C.store_box_bytes, kSlice);
  static_assert((C.parts - 1) * kSlices <= C.stages && (C.parts == 1 || !C.swap_ab));
  return {shared.rows[(part - 1) * kSlices][0] + thread.group * kSlice, sizeof(shared.rows[0])};
}

// Stores `size` tokens of a tile from `first` on without TMA, and only those of the group: kWidth elements of each
// from `first_weight` on, 16 bytes at a time, from a box that is swizzled as for TMA.
template <GemmConfig C, class Element, int kWidth>
__device__ void store_rows(const uint8_t* box, const Arguments& args, const TileCoord<C>& coord, int first, int size,
                           int first_weight, int thread) {
  constexpr int kPitch = kWidth * sizeof(Element), kUnits = kPitch / 16, kInUnit = 16 / sizeof(Element);
  const Groups& groups = args.groups;
  const int begin = max(coord.begin() - first, 0), end = min(coord.end() - first, size);
  auto* d = static_cast<Element*>(groups.d) + coord.matrix * groups.d_matrix_stride +
            (coord.first_token + first) * groups.d_row_stride;
#pragma unroll 1
  for (int unit = begin * kUnits + thread; unit < end * kUnits; unit += kWarpgroup) {
    const int y = unit / kUnits, x = unit % kUnits, weight = first_weight + x * kInUnit;
    const uint4 v = *reinterpret_cast<const uint4*>(box + y * kPitch + (x ^ y * kPitch / 128 % kUnits) * 16);
    if (weight < args.num_weights) *reinterpret_cast<uint4*>(d + y * groups.d_row_stride + weight) = v;
  }
}

// Does what the TMA of `store_tile` does where not all tokens are the group's: no other row is written.
template <GemmConfig C>
__device__ void store_some(Staging staging, const Arguments& args, const TileCoord<C>& coord, int first_col, int first,
                           const Thread<C>& thread) {
#pragma unroll
  for (int box = 0; box < C.store_boxes; ++box) {
    const int col = C.swap_ab ? thread.group * 64 : first_col + box * C.store_box_weights;
    store_rows<C, uint16_t, C.store_box_weights>(staging.box<C>(box), args, coord, first, C.store_box_tokens,
                                                     coord.weight(args, col), thread.index);
  }
}

// Writes 64 rows of a tile of the output, store_n columns of it from `first_col` on, through shared memory.
template <GemmConfig C>
__device__ void store_tile(float (&total)[C.store_n / 2], Staging staging, const TensorMap& d_map,
                      const Arguments& args, const TileCoord<C>& coord, int first_col, const TileBias<C>& bias,
                      const Thread<C>& thread) {
  constexpr int kGroups = C.store_n / 8;
  bias.add_to(total, thread);
  named_barrier<kWarpgroup>(1 + thread.group);
  // Four matrices at a time: rows 0-7 and 8-15 of two groups of 8 columns. Lane l addresses row l % 8
  // of matrix l / 8; where weights are the rows, the matrices are transposed on the way.
  constexpr int kPitch = C.store_box_weights * 2, kUnits = kPitch / 16;
#pragma unroll
  for (int j = 0; j < kGroups; j += 2) {
    const int group = j + thread.lane / 16, half = thread.lane / 8 % 2;
    const int y = C.swap_ab ? group * 8 + thread.lane % 8 : thread.warp * 16 + half * 8 + thread.lane % 8;
    const int x = C.swap_ab ? thread.warp * 16 + half * 8 : group * 8;
    const int unit = x % C.store_box_weights / 8 ^ y * kPitch / 128 % kUnits;  // the swizzle
    const uint32_t address = shared_address(staging.box<C>(x / C.store_box_weights)) + y * kPitch + unit * 16;
    const auto packed = [&](int i) { return pack_bf16(total[4 * j + 2 * i], total[4 * j + 2 * i + 1]); };
    if (j + 1 < kGroups) {
      store_matrices<C.swap_ab>(address, packed(0), packed(1), packed(2), packed(3));
    } else {
      store_matrices<C.swap_ab>(address, packed(0), packed(1));
    }
  }
  // The first of the tile's tokens here.
  const int first = C.swap_ab ? first_col : coord.is_half() ? 0 : thread.group * 64;
  const bool all = !C.grouped || (coord.begin() <= first && first + C.store_box_tokens <= coord.end());
  fence_for_async();
  named_barrier<kWarpgroup>(1 + thread.group);
  if (C.grouped && !all) {
    store_some<C>(staging, args, coord, first_col, first, thread);
  } else if (thread.index == 0) {
#pragma unroll
    for (int i = 0; i < C.store_boxes; ++i) {
      const int weight = C.swap_ab ? thread.group * 64 : first_col + i * C.store_box_weights;
      const Corner at{coord.weight(args, weight), coord.first_token + first, coord.matrix};
      tma_store<C.dimensions>(d_map, staging.box<C>(i), at);
    }
    tma_store_commit();
  }
}
