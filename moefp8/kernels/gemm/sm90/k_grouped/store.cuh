// How a tile leaves a CTA. `store_staged` takes it through shared memory by TMA, and `store_part` from registers, where
// TMA cannot address d; both write it, or add it to what d holds. `store_zeros` is for experts without tokens.
#pragma once
#include "pipeline.cuh"
#include "schedule.cuh"
#include "matrix.cuh"
#include "tma.cuh"

// Exchanges words with the lane that is `distance` away: one of each pair stays, the other one goes.
__device__ inline void exchange(uint32_t& low, uint32_t& high, bool is_upper, int distance) {
  const uint32_t got = __shfl_xor_sync(~0u, is_upper ? low : high, distance);
  low = is_upper ? got : low, high = is_upper ? high : got;
}

// Four lanes side by side have the rows of a 4x4 square of words; afterwards they have its columns.
__device__ inline void transpose_words(uint32_t (&words)[4], int lane) {
  exchange(words[0], words[1], lane & 1, 1), exchange(words[2], words[3], lane & 1, 1);
  exchange(words[0], words[2], lane & 2, 2), exchange(words[1], words[3], lane & 2, 2);
}

template <Output kOutput>
__device__ inline void store_two(float* d, float x, float y) {
  if constexpr (kOutput == Output::kAccumulate) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(d), "f"(x), "f"(y) : "memory");
  } else {
    *reinterpret_cast<float2*>(d) = {x, y};
  }
}
template <Output kOutput>
__device__ inline void store_one(float* d, float x) {
  if constexpr (kOutput == Output::kAccumulate) atomicAdd(d, x);  // one CTA has the tile: nobody else adds
  else *d = x;
}

// Stores one part of a tile from registers.
template <KGroupedConfig C>
__device__ void store_part(const float (&total)[C.tile_n / 2], const Arguments& args, int expert, int row, int col,
                           const Thread<C>& thread) {
  uint8_t* matrix = args.d + expert * args.d_matrix_bytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at_row = row + thread.row + 8 * half;
    uint8_t* target = matrix + at_row * args.d_row_bytes;
    const bool exists = at_row < args.m;
    if constexpr (C.output == Output::kBFloat16) {
#pragma unroll
      for (int j = 0; j < C.tile_n / 8; j += 4) {  // four groups of 8 columns: each lane gets one of them
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = 4 * (j + i) + 2 * half;
          words[i] = pack_bf16(total[first], total[first + 1]);
        }
        transpose_words(words, thread.lane);
        int first = col + (j + thread.lane % 4) * 8;
        asm volatile("" : "+r"(first));  // else the compiler forms all addresses ahead of all stores
        if (args.aligned) {
          if (exists && first < args.n) {
            *reinterpret_cast<uint4*>(target + first * 2) = {words[0], words[1], words[2], words[3]};
          }
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (exists && first + i < args.n)
              reinterpret_cast<uint16_t*>(target)[first + i] = words[i / 2] >> i % 2 * 16;
          }
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < C.tile_n / 8; ++j) {
        const int first = col + j * 8 + thread.col;
        const float x = total[4 * j + 2 * half], y = total[4 * j + 2 * half + 1];
        float* two = reinterpret_cast<float*>(target) + first;
        if (args.aligned) {
          if (exists && first < args.n) store_two<C.output>(two, x, y);
        } else {
          if (exists && first < args.n) store_one<C.output>(two, x);
          if (exists && first + 1 < args.n) store_one<C.output>(two + 1, y);
        }
      }
    }
  }
}

// Stores one part of a tile through shared memory. Rows of a box are 128 B long, and its units of 16 B are swizzled.
template <KGroupedConfig C>
__device__ void store_staged(const float (&total)[C.tile_n / 2], Shared<C>& shared, const Maps& maps, int expert,
                             int row, int col, int part, const Thread<C>& thread) {
  uint8_t(&boxes)[C.output_boxes][64 * 128] = shared.output.boxes[thread.group][part % C.output_buffers];
  const bool is_first = threadIdx.x % kWarpgroup == 0;
  if (is_first) tma_store_wait_read<C.output_buffers - 1>();
  named_barrier<kWarpgroup>(1 + thread.group);
  const int warp_row = threadIdx.x % kWarpgroup / kWarp * 16;
  if constexpr (C.output == Output::kBFloat16) {
    // Four matrices at a time: rows 0-7 and 8-15 of two groups of 8 columns. Lane l addresses row l % 8 of matrix
    // l / 8.
#pragma unroll
    for (int j = 0; j < C.tile_n / 8; j += 2) {
      const int y = warp_row + thread.lane % 16, unit = (j + thread.lane / 16) % 8 ^ y % 8;
      const auto packed = [&](int i) { return pack_bf16(total[4 * j + 2 * i], total[4 * j + 2 * i + 1]); };
      const uint32_t address = shared_address(boxes[j / 8]) + y * 128 + unit * 16;
      store_matrices<false>(address, packed(0), packed(1), packed(2), packed(3));
    }
  } else {
#pragma unroll
    for (int i = 0; i < C.tile_n / 4; ++i) {  // two columns of row i % 2 * 8
      const int y = warp_row + thread.lane / 4 + i % 2 * 8, x = i / 2 * 8 + thread.col, unit = x / 4 % 8 ^ y % 8;
      *reinterpret_cast<float2*>(boxes[x / 32] + y * 128 + unit * 16 + x % 4 * 4) = {total[2 * i], total[2 * i + 1]};
    }
  }
  fence_for_async();
  named_barrier<kWarpgroup>(1 + thread.group);
  if (is_first) {
    const int first_row = row + (thread.group * C.parts + part) * 64;
#pragma unroll
    for (int i = 0; i < C.output_boxes; ++i) {
      const Corner at{col + i * C.box_n, first_row, expert};
      if constexpr (C.output == Output::kAccumulate) tma_add(maps.d, boxes[i], at);
      else tma_store<3>(maps.d, boxes[i], at);
    }
    tma_store_commit();
  }
}

// Writes zeros to the tile of an expert that has no tokens.
template <KGroupedConfig C>
__device__ void store_zeros(const Arguments& args, const Schedule<C>& schedule) {
  constexpr int kBytes = C.output == Output::kBFloat16 ? 2 : 4;
  const int unit = args.aligned ? 8 / kBytes : 1, width = min(C.tile_n, args.n - schedule.col);
  const int lane = threadIdx.x % kWarp, num_rows = min(C.tile_m, args.m - schedule.row);
#pragma unroll 1
  for (int row = threadIdx.x / kWarp; row < num_rows; row += C.warpgroups * kWarpgroup / kWarp) {
    uint8_t* target = args.d + schedule.expert * args.d_matrix_bytes + (schedule.row + row) * args.d_row_bytes;
#pragma unroll 1
    for (int i = lane * unit; i < width; i += kWarp * unit) {
      uint8_t* element = target + (schedule.col + i) * kBytes;
      if (args.aligned) *reinterpret_cast<uint2*>(element) = {};
      else if (kBytes == 2) *reinterpret_cast<uint16_t*>(element) = 0;
      else *reinterpret_cast<uint32_t*>(element) = 0;
    }
  }
}
