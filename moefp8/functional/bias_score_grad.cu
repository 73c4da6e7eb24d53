// What the bias of down adds to the gradient of a score: an expert's output is `down(a) + bias`.
#include "input.cuh"

constexpr int kThreads = 128;
constexpr int kColumns = 4;  // of a thread, side by side

struct Arguments {
  const uint8_t* rows;        // E4M3 [R, H]: the gradient of each row's token
  int64_t row_bytes;          // the pitch of its rows, a multiple of 4
  const float* scales;        // [H/128, pitch], rows innermost
  int64_t scale_pitch;
  const uint8_t* bias;        // [E, H], contiguous
  const int* expert_offsets;  // [E + 1]: an expert's first row, and the one after its last
  const int* token_to_row;    // [T, k]; -1: no row
  float* grad_scores;         // [T, k]
  uint32_t num_experts, size;
};

// grad_scores[t, j] += <the gradient of token t, bias of the expert of choice j>, in FP32.
// Grid: a CTA of 128 threads owns a choice.
// Shared memory: 16 B, a sum of each warp.
// Barriers: one for each 128 experts, which finds the row's expert, and one before the warps' sums are added up.
// Alignment: rows begin at multiples of 4 B, and may end anywhere.
template <Input kBias>
__global__ void __launch_bounds__(kThreads) bias_score_grad_kernel(const __grid_constant__ Arguments args) {
  __shared__ float warp_sums[kThreads / kWarp];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int row = args.token_to_row[blockIdx.x];
  if (row < 0) return;
  int64_t expert = 0;  // as many experts end before the row, or with it
  for (uint32_t first = 0; first < args.num_experts; first += kThreads) {
    const uint32_t i = first + threadIdx.x;
    expert += __syncthreads_count(i < args.num_experts && args.expert_offsets[i + 1] <= row);
  }
  const uint8_t* row_codes = args.rows + row * args.row_bytes;
  const uint8_t* bias = args.bias + expert * args.size * kBytesOf<kBias>;
  float sum = 0;
  for (uint32_t column = threadIdx.x * kColumns; column < args.size; column += kThreads * kColumns) {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(row_codes + column);
    const float scale = args.scales[column / 128 * args.scale_pitch + row];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (column + i >= args.size) break;
      sum = fmaf(decode_e4m3(codes, i) * scale, load_float<kBias>(bias + (column + i) * kBytesOf<kBias>), sum);
    }
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) args.grad_scores[blockIdx.x] += warp_sums[0] + warp_sums[1] + warp_sums[2] + warp_sums[3];
}
