// The first pass over a tile, along its rows: `first_pass`, then `store_products`. It stores row codes with their
// scales, and the sums of grad times `a`. The largest magnitudes of columns stay in registers, for the second pass.
#pragma once
#include "activation_columns_tile.cuh"

// The larger of a magnitude and that of x; NaN is the largest.
__device__ inline float larger_magnitude(float amax, float x) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(amax), "f"(fabsf(x)));
  return larger;
}

// Keeps one of two values and sends the other to the lane at `distance`, which keeps the other kind. Returns the kept
// value combined with the received one.
template <class Combine>
__device__ float keep_half(float first, float second, uint32_t distance, Combine combine) {
  const bool is_second = threadIdx.x & distance;
  const float kept = is_second ? second : first;
  return combine(kept, __shfl_xor_sync(0xffffffff, is_second ? first : second, distance));
}

// The addresses at which a thread stores row codes, in each step of the first pass.
struct RowTargets {
  uint8_t* codes;  // of gate in its first row
  float* scale;    // of the row and the half for which it makes the scale
  uint32_t num_rows;

  __device__ RowTargets(const Arguments& args, const Tile& tile) : num_rows(tile.rows.num_rows) {
    const int64_t row = tile.rows.first_row + first_row(), own_row = row + threadIdx.x / 8 % 2;
    const uint32_t half = threadIdx.x / 4 % 2;
    codes = args.rows + row * args.row_pitch + tile.first_column + threadIdx.x % kLanes * kColumns;
    scale = args.row_scales + (half * args.num_tiles.value + tile.index) * args.scale_pitch + own_row;
  }

  // Quantizes the gradients of gate and of up in two rows, and advances to the next step. Sixteen lanes have a pair of
  // rows: each four of them make one of its four scales, and all lanes read it.
  __device__ void store(const Arguments& args, uint32_t row, const float (&values)[2][2][kColumns],
                        const float (&amax)[2][2]) {
    const auto larger = [](float x, float y) {
      return __uint_as_float(max(__float_as_uint(x), __float_as_uint(y)));
    };
    const float of_gate = keep_half(amax[0][0], amax[1][0], 8, larger);
    const float of_up = keep_half(amax[0][1], amax[1][1], 8, larger);
    float mine = keep_half(of_gate, of_up, 4, larger);
#pragma unroll
    for (uint32_t distance = 2; distance > 0; distance /= 2)
      mine = larger(mine, __shfl_xor_sync(0xffffffff, mine, distance));
    const Scale made(__float_as_uint(mine), false, args.min_amax);
    if (threadIdx.x % 4 == 0 && row + threadIdx.x / 8 % 2 < num_rows) *scale = made.scale_inv;
    scale += kRowStep;
    uint8_t* target = codes;
    codes += kRowStep * args.row_pitch;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const int source = (threadIdx.x & kLanes) + i * 8 + half * 4;
        const Divider divider = {__uint_as_float(__shfl_sync(0xffffffff, __float_as_uint(made.divisor), source)),
                                 __uint_as_float(__shfl_sync(0xffffffff, __float_as_uint(made.reciprocal), source))};
        const float* x = values[i][half];
        const auto four = [&](int j) {
          return encode_e4m3(divider.divide(x[j]), divider.divide(x[j + 1]), divider.divide(x[j + 2]),
                             divider.divide(x[j + 3]));
        };
        const uint2 both = {four(0), four(4)};
        if (row + i < num_rows) *reinterpret_cast<uint2*>(target + half * args.num_tiles.value * kTile) = both;
      }
      target += args.row_pitch;
    }
  }
};

// Overwrites the thread's copy of a row with zeros, from `count` columns on.
template <bool kIsFp8>
__device__ void clear(uint8_t* grad, uint8_t* gate, uint32_t count) {
#pragma unroll 1
  for (uint32_t i = count; i < kColumns; ++i) {
    reinterpret_cast<uint16_t*>(grad)[i] = 0;
    for (uint32_t half = 0; half < 2; ++half) {
      uint8_t* target = gate + half * sizeof(Memory<kIsFp8>::saved[0]);
      if constexpr (kIsFp8) {
        target[i] = 0;
      } else {
        reinterpret_cast<uint16_t*>(target)[i] = 0;
      }
    }
  }
}

// Row codes, the largest magnitudes of columns in the rows of a thread, and the sums of grad times `a`. With kBlocks,
// of_columns[2][0] is the largest magnitude in all columns of weighted `a`.
template <Activation kKind, bool kIsLimited, bool kIsFp8, bool kBlocks>
__device__ void first_pass(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory,
                           float (&of_columns)[kResults][kColumns]) {
  const uint32_t column = threadIdx.x % kLanes * kColumns, of_all = tile.first_column + column;
  const uint32_t width = args.size - min(args.size, of_all);
  uint8_t *of_grad = memory.grad.at(first_row(), column), *of_gate = memory.saved[0].at(first_row(), column);
  RowTargets targets(args, tile);
#pragma unroll 2
  for (uint32_t row = first_row(); row / kRowStep * kRowStep < tile.rows.num_rows; row += kRowStep) {
    wait_for_copies<kSteps - 1>();
    float values[2][2][kColumns], amax[2][2];
    const uint2 weights = *reinterpret_cast<const uint2*>(&memory.weights[row]);
    // Rows without a choice, and elements after the end of a row, count as zeros, whatever their memory holds.
    if (weights.x == 0 || weights.y == 0 || width < kColumns) {
#pragma unroll 1
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t count = (i == 0 ? weights.x : weights.y) == 0 ? 0 : width;
        clear<kIsFp8>(of_grad + memory.grad.distance(0, i), of_gate + memory.saved[0].distance(0, i), count);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float weight = __fadd_rn(__uint_as_float(i == 0 ? weights.x : weights.y), 0);  // -0 becomes 0
      const uint32_t in_grad = memory.grad.distance(0, i), in_gate = memory.saved[0].distance(0, i);
      float scales[2] = {1, 1};
      if constexpr (kIsFp8) scales[0] = memory.scales[0][row + i], scales[1] = memory.scales[1][row + i];
      Part<kIsFp8, kColumns> part;
      part.load(of_grad + in_grad, of_gate + in_gate);
      float product = 0;
      amax[i][0] = amax[i][1] = 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float grad = part.grad_at(j);
        const ActivationGradient x =
            differentiate<kKind, kIsLimited>(grad, weight, part.saved_at(0, j, scales[0]),
                                             part.saved_at(1, j, scales[1]), args.activation);
        values[i][0][j] = x.grad_gate, values[i][1][j] = x.grad_up;
        amax[i][0] = larger_magnitude(amax[i][0], x.grad_gate), amax[i][1] = larger_magnitude(amax[i][1], x.grad_up);
        of_columns[0][j] = larger_magnitude(of_columns[0][j], x.grad_gate);
        of_columns[1][j] = larger_magnitude(of_columns[1][j], x.grad_up);
        float& of_activated = of_columns[2][kBlocks ? 0 : j];
        of_activated = larger_magnitude(of_activated, __fmul_rn(weight, x.activated));
        product = __fmaf_rn(grad, x.activated, product);
      }
      memory.products[row + i][threadIdx.x % kLanes] = product;
    }
    targets.store(args, row, values, amax);
    of_grad += memory.grad.distance(1, 0), of_gate += memory.saved[0].distance(1, 0);
    end_copy_group();  // an empty one, so that the next step waits for the same number
  }
}

// Adds up the products of the threads of each row.
template <bool kIsFp8>
__device__ void store_products(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory) {
  __syncthreads();
  const uint32_t row = threadIdx.x;
  if (row < tile.rows.num_rows) {
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kLanes / 4; ++i) {
      const float4 four = reinterpret_cast<const float4*>(memory.products[row])[i];
      sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(four.x, four.y), __fadd_rn(four.z, four.w)));
    }
    args.partial_sums[static_cast<int64_t>(tile.index) * args.num_rows + tile.rows.first_row + row] = sum;
    memory.weights[row] = __fadd_rn(memory.weights[row], 0);  // -0 becomes 0, for the second pass
  }
  __syncthreads();
}
