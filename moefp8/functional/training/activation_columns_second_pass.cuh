// The second pass over a tile, along its columns: `find_scales`, then `store_columns`. It makes scales from the largest
// magnitudes of the first pass, computes all values again, and stores column codes.
#pragma once
#include "activation_columns_tile.cuh"

constexpr int kUnits = kTile / kUnitRows * kTile / 2 / kThreads;  // of a thread: sixteen rows and two columns
template <bool kBlocks>
constexpr int kOfColumns = kBlocks ? 2 : kResults;  // results that have a scale for each column

// Makes the scales of columns from the magnitudes of all threads. With kBlocks, weighted `a` has a single scale; its
// divider is stored as that of the first column.
template <bool kIsFp8, bool kBlocks>
__device__ void find_scales(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory,
                            float (&of_columns)[kResults][kColumns]) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kOfColumns<kBlocks>; ++i) {
    float* target = memory.amax[warp][i] + lane % kLanes * kColumns;
    uint32_t words[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const uint32_t word = __float_as_uint(of_columns[i][j]);
      words[j] = max(word, __shfl_xor_sync(0xffffffff, word, kLanes));
    }
    if (lane < kLanes) {
      reinterpret_cast<uint4*>(target)[0] = {words[0], words[1], words[2], words[3]};
      reinterpret_cast<uint4*>(target)[1] = {words[4], words[5], words[6], words[7]};
    }
  }
  if constexpr (kBlocks) {
    const uint32_t word = __reduce_max_sync(0xffffffff, __float_as_uint(of_columns[2][0]));
    if (lane == 0) memory.amax[warp][2][0] = __uint_as_float(word);
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kOfColumns<kBlocks> * kTile + (kBlocks ? 1 : 0); i += kThreads) {
    const uint32_t result = i / kTile, in_tile = i % kTile, column = tile.first_column + in_tile;
    uint32_t amax = 0;
#pragma unroll
    for (int j = 0; j < kThreads / kWarp; ++j) amax = max(amax, __float_as_uint(memory.amax[j][result][in_tile]));
    const Scale scale(amax, false, args.min_amax);
    memory.dividers[result][in_tile] = scale;
    if (column >= args.size) continue;
    if (result == 2) {
      const uint32_t place = kBlocks ? tile.index : column;
      args.activated_scales[tile.block * args.activated_scale_pitch + place] = scale.scale_inv;
    } else {
      args.gate_up_scales[tile.block * args.gate_up_scale_pitch + result * args.size + column] = scale.scale_inv;
    }
  }
  __syncthreads();
}

// The addresses of a thread's column codes, in its first column: of gate, of up and of `a`.
struct ColumnTargets {
  uint8_t* codes[kResults];
  uint32_t column, first_row;  // in the tile

  __device__ ColumnTargets(const Arguments& args, const Tile& tile)
      : column(threadIdx.x / kWarp * kUnits * 8 + threadIdx.x % 4 * 2), first_row(threadIdx.x % kWarp / 4 * kUnitRows) {
    const int64_t line = static_cast<int64_t>(tile.block) * args.size, of_all = tile.first_column + column;
    codes[0] = args.gate_up_columns + (2 * line + of_all) * kTile + first_row;
    codes[1] = codes[0] + static_cast<int64_t>(args.size) * kTile;
    codes[2] = args.activated_columns + (line + of_all) * kTile + first_row;
  }
};

// Writes zeros as the codes of rows that do not exist: if the divisor is NaN, quotients of zeros are NaN.
__device__ inline void clear_codes(uint8_t* codes, uint32_t num_rows) {
#pragma unroll 1
  for (uint32_t row = num_rows; row < kUnitRows; ++row) codes[row] = 0;
}

// Stores codes of two adjacent columns and sixteen rows. The eight threads of a column store a line of 128 B.
template <Activation kKind, bool kIsLimited, bool kIsFp8, bool kBlocks>
__device__ void store_columns(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory,
                              const ColumnTargets& targets, uint32_t unit) {
  const uint32_t first_row = targets.first_row, column = targets.column + unit * 8;
  const uint8_t *of_grad = memory.grad.at(first_row, column), *of_gate = memory.saved[0].at(first_row, column);
  Divider dividers[kResults][2];
#pragma unroll
  for (int i = 0; i < kOfColumns<kBlocks>; ++i) {
    const float4 both = *reinterpret_cast<const float4*>(&memory.dividers[i][column]);
    dividers[i][0] = {both.x, both.y}, dividers[i][1] = {both.z, both.w};
  }
  if constexpr (kBlocks) dividers[2][0] = dividers[2][1] = memory.dividers[2][0];
  uint32_t codes[kResults][2][kUnitRows / 4];
#pragma unroll
  for (int q = 0; q < kUnitRows / 4; ++q) {
    const uint32_t four = first_row + 4 * q;
    float weights[4], scales[2][4];
    *reinterpret_cast<float4*>(weights) = *reinterpret_cast<const float4*>(&memory.weights[four]);
    if constexpr (kIsFp8) {
      *reinterpret_cast<float4*>(scales[0]) = *reinterpret_cast<const float4*>(&memory.scales[0][four]);
      *reinterpret_cast<float4*>(scales[1]) = *reinterpret_cast<const float4*>(&memory.scales[1][four]);
    }
    float quotients[kResults][2][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      Part<kIsFp8, 2> part;
      part.load(of_grad + memory.grad.distance(0, 4 * q + r), of_gate + memory.saved[0].distance(0, 4 * q + r));
      const float weight = weights[r];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const ActivationGradient x =
            differentiate<kKind, kIsLimited>(part.grad_at(j), weight, part.saved_at(0, j, scales[0][r]),
                                             part.saved_at(1, j, scales[1][r]), args.activation);
        quotients[0][j][r] = dividers[0][j].divide(x.grad_gate);
        quotients[1][j][r] = dividers[1][j].divide(x.grad_up);
        quotients[2][j][r] = dividers[2][j].divide(__fmul_rn(weight, x.activated));
      }
    }
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* x = quotients[i][j];
        codes[i][j][q] = encode_e4m3(x[0], x[1], x[2], x[3]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (tile.first_column + column + j >= args.size) return;
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
      uint8_t* target = targets.codes[i] + (unit * 8 + j) * kTile;
      *reinterpret_cast<uint4*>(target) = {codes[i][j][0], codes[i][j][1], codes[i][j][2], codes[i][j][3]};
      if (tile.rows.num_rows < first_row + kUnitRows)
        clear_codes(target, max(tile.rows.num_rows, first_row) - first_row);
    }
  }
}
