// The gradients of experts' biases: sums over the rows of each expert.
#include "input.cuh"

constexpr int kBlock = 128;
constexpr int kWarps = 8;
constexpr int kColumns = kBlock / kWarp;  // of a lane, side by side
constexpr int kUnroll = 4;                // rows that a warp reads at a time

struct Arguments {
  const uint8_t* rows;         // E4M3 [R, parts, padded size]
  int64_t row_bytes;           // the pitch of its rows, a multiple of 4
  const float* scales;         // [parts * padded size / 128, pitch], rows innermost
  int64_t scale_pitch;
  const int* expert_offsets;   // [E + 1]: an expert's first row, and the one after its last
  const float* weight_of_row;  // [R], which multiplies a row; null: 1
  float* grad_bias;            // [E, parts, size]
  uint32_t num_blocks;         // of all parts
  uint32_t size, padded_size;
};

// grad_bias[e] += sum of weight * scale * code over the rows of expert e, in FP32.
// Grid: a CTA of 256 threads owns 128 columns of one expert; its warps take rows in turns.
// Shared memory: 4 KiB, the sums of each warp.
// Barriers: one, before these are added up, in the order of the warps.
// Alignment: rows begin at multiples of 4 B; a part that is not padded may end anywhere.
__global__ void __launch_bounds__(kWarps * kWarp) bias_grad_kernel(const __grid_constant__ Arguments args) {
  __shared__ float warp_sums[kWarps][kBlock];
  const uint32_t expert = blockIdx.x / args.num_blocks, block = blockIdx.x - expert * args.num_blocks;
  const uint32_t part = block * kBlock / args.padded_size, begin = block * kBlock - part * args.padded_size;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  wait_for_previous_kernel();
  let_next_kernel_start();

  float sums[kColumns] = {};
  if (begin + lane * kColumns < args.size) {
    const int end = args.expert_offsets[expert + 1];
    const uint8_t* block_codes = args.rows + block * kBlock + lane * kColumns;
    const float* block_scales = args.scales + block * args.scale_pitch;
    for (int first = args.expert_offsets[expert] + warp; first < end; first += kUnroll * kWarps) {
      uint32_t codes[kUnroll];
      float factors[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int row = first + i * kWarps;
        if (row >= end) {
          codes[i] = 0, factors[i] = 0;
          continue;
        }
        codes[i] = *reinterpret_cast<const uint32_t*>(block_codes + row * args.row_bytes);
        factors[i] = block_scales[row] * (args.weight_of_row == nullptr ? 1 : args.weight_of_row[row]);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[j] = fmaf(decode_e4m3(codes[i], j), factors[i], sums[j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) warp_sums[warp][lane * kColumns + j] = sums[j];
  __syncthreads();
  const uint32_t column = begin + threadIdx.x;
  if (threadIdx.x >= kBlock || column >= args.size) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += warp_sums[i][threadIdx.x];
  const uint32_t num_parts = args.num_blocks * kBlock / args.padded_size;
  args.grad_bias[(static_cast<int64_t>(expert) * num_parts + part) * args.size + column] += sum;
}
