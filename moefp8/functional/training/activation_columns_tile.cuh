// A tile of 128x128: which one a CTA owns, its copy in shared memory, and how threads write and read that.
//
// Both passes read the same memory. The first goes along rows: a warp has four rows at once, sixteen lanes two of them.
// A thread reads only its own copies, so it waits for no others. The second goes along columns: a thread has two
// columns and sixteen rows.
#pragma once
#include "activation.cuh"
#include "activation_columns_arguments.cuh"
#include "column_block.cuh"
#include "copy_async.cuh"
#include "fp8.cuh"

constexpr int kTile = ColumnBlock::kRows;       // rows and columns
constexpr int kColumns = 8;                     // of a thread, side by side, in the first pass
constexpr int kLanes = kTile / kColumns;        // threads that share a row in the first pass
constexpr int kRowStep = 4 * kThreads / kWarp;  // rows that the first pass takes at once, four a warp
constexpr int kSteps = kTile / kRowStep;
constexpr int kUnitRows = 16;                   // of a thread in the second pass, with two columns
constexpr int kResults = 3;                     // gradients of gate and of up, and weighted `a`

// 128 rows of a tile in shared memory. After each sixteen rows 16 B are left out, so that rows sixteen apart are in
// different banks.
template <int kElementBytes>
struct Rows {
  static constexpr int kRowBytes = kTile * kElementBytes, kUnitBytes = kUnitRows * kRowBytes + 16;
  alignas(16) uint8_t bytes[kTile / kUnitRows * kUnitBytes];

  __device__ uint8_t* at(uint32_t row, uint32_t column) {
    return bytes + row / kUnitRows * kUnitBytes + row % kUnitRows * kRowBytes + column * kElementBytes;
  }
  // Bytes to the same columns, `step` steps of the first pass and i rows further on, within the same sixteen rows.
  __device__ static constexpr uint32_t distance(uint32_t step, uint32_t i) {
    return step * (kRowStep / kUnitRows) * kUnitBytes + i * kRowBytes;
  }
};

// The shared memory of a CTA: 112 KB, or 81 KB if gate and up are E4M3.
template <bool kIsFp8>
struct Memory {
  static constexpr int kSavedBytes = kIsFp8 ? 1 : 2;
  Rows<2> grad;
  Rows<kSavedBytes> saved[2];  // gate, up
  union {
    alignas(16) float amax[kThreads / kWarp][kResults][kTile];  // of columns, from each warp
    alignas(16) float products[kTile][kLanes + 4];  // <grad, a>, from each thread; without bank conflicts
  };
  alignas(16) Divider dividers[kResults][kTile];
  alignas(16) float weights[kTile];  // 0 where no choice has the row
  alignas(16) float scales[2][kIsFp8 ? kTile : 1];
};

// The tile of a CTA.
struct Tile {
  uint32_t block, index, first_column;
  ColumnBlock rows;

  __device__ Tile(const Arguments& args)
      : block(args.num_tiles.quotient(blockIdx.x)),
        index(blockIdx.x - block * args.num_tiles.value),
        first_column(index * kTile),
        rows(args.expert_offsets, args.num_experts, args.num_rows, block) {}
};

// A thread's first row in the first pass. It has two rows in each step; steps are kRowStep rows apart.
__device__ inline uint32_t first_row() { return threadIdx.x / kWarp * 4 + threadIdx.x / kLanes % 2 * 2; }

// Copies codes of gate or of up that are not at multiples of 8 B.
__device__ inline void copy_bytes(uint8_t* target, const uint8_t* source, uint32_t num_bytes) {
  uint32_t codes[2] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i < num_bytes) codes[i / 4] |= uint32_t(source[i]) << i % 4 * 8;
  }
  *reinterpret_cast<uint2*>(target) = {codes[0], codes[1]};
}

// Starts the copies that the thread reads in the first pass, one group for each step.
template <bool kIsFp8>
__device__ void copy_tile(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory) {
  const uint32_t in_tile = threadIdx.x % kLanes * kColumns, column = tile.first_column + in_tile;
  const uint32_t row = tile.rows.first_row + first_row();
  const uint8_t* grad = args.grad + row * args.grad_row_bytes + column * 2;
  const uint8_t* saved = args.saved + row * 2 * args.saved_row_bytes + column * memory.kSavedBytes;
  uint8_t* grad_target = memory.grad.at(first_row(), in_tile);
  uint8_t* saved_target = memory.saved[0].at(first_row(), in_tile);
  const uint32_t num_rows = column < args.size ? tile.rows.num_rows : 0;
  const bool is_bytewise = kIsFp8 && args.size % kColumns != 0;
#pragma unroll
  for (uint32_t step = 0; step < kSteps; ++step) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const bool exists = first_row() + step * kRowStep + i < num_rows;
      copy_async<16>(grad_target + memory.grad.distance(step, i), grad, exists);
      grad += (i == 0 ? 1 : kRowStep - 1) * args.grad_row_bytes;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint8_t* source = saved;
        uint8_t* target = saved_target + memory.saved[0].distance(step, i) + half * sizeof(memory.saved[0]);
        saved += (i == 0 || half == 0 ? 1 : 2 * kRowStep - 3) * args.saved_row_bytes;
        if constexpr (!kIsFp8) {
          copy_async<16>(target, source, exists);
        } else if (!is_bytewise) {
          copy_async<8>(target, source, exists);
        } else {
          copy_bytes(target, source, exists ? args.size - column : 0);
        }
      }
    }
    end_copy_group();
  }
}

// Copies the weights of rows, and the scales of gate and up.
template <bool kIsFp8>
__device__ void copy_factors(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory) {
  if constexpr (kIsFp8) {
    const uint32_t row = threadIdx.x / 2, of_all = tile.rows.first_row + row;
    float scale = 0;
    if (row < tile.rows.num_rows && __float_as_uint(args.weight_of_row[of_all]) != 0) {
      const int64_t of_saved = 2 * static_cast<int64_t>(of_all) + threadIdx.x % 2;
      scale = args.saved_scales[tile.index * args.saved_scale_pitch + of_saved];
    }
    memory.scales[threadIdx.x % 2][row] = scale;
  }
  const uint32_t row = threadIdx.x;
  if (row >= kTile) return;
  memory.weights[row] = row < tile.rows.num_rows ? args.weight_of_row[tile.rows.first_row + row] : 0;
}

// Neighbouring elements of a row of the tile, loaded from shared memory.
template <bool kIsFp8, int kCount>
struct Part {
  static constexpr int kBytes = kCount * (kIsFp8 ? 1 : 2);
  uint32_t grad[kCount / 2], saved[2][kBytes >= 4 ? kBytes / 4 : 1];

  // of_grad, of_gate: their addresses.
  __device__ void load(const uint8_t* of_grad, const uint8_t* of_gate) {
    load_words<kCount * 2>(grad, of_grad);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      load_words<kBytes>(saved[half], of_gate + half * sizeof(Memory<kIsFp8>::saved[0]));
  }

  __device__ static float bf16(const uint32_t* words, int i) {
    return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
  }
  __device__ float grad_at(int i) const { return bf16(grad, i); }
  __device__ float saved_at(int half, int i, float scale) const {
    if constexpr (kIsFp8) return __fmul_rn(decode_e4m3(saved[half][i / 4], i % 4), scale);
    return bf16(saved[half], i);
  }

 private:
  template <int kNumBytes>
  __device__ static void load_words(uint32_t* words, const uint8_t* source) {
    if constexpr (kNumBytes == 16) {
      const uint4 four = *reinterpret_cast<const uint4*>(source);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if constexpr (kNumBytes == 8) {
      const uint2 two = *reinterpret_cast<const uint2*>(source);
      words[0] = two.x, words[1] = two.y;
    } else if constexpr (kNumBytes == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(source);
    } else {
      words[0] = *reinterpret_cast<const uint16_t*>(source);
    }
  }
};
