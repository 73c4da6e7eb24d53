// Combine on Hopper: the weighted sum of each token's rows, in FP32 and in the order of its choices, and an addend.
#include "divisor.cuh"
#include "fp8.cuh"
#include "input.cuh"
#include "matrix.cuh"

struct Arguments {
  const uint8_t* y;         // bf16 [R, H]
  int64_t y_row_bytes;      // the pitch of rows
  const int* token_to_row;  // [T, k]; -1: no row
  const uint8_t* weights;   // [T, k]
  int64_t weight_token_bytes, weight_choice_bytes;
  uint8_t* out;           // bf16 [T, H]
  const uint8_t* addend;  // bf16 [T, H], or null
  uint32_t num_tokens, top_k, hidden_size;
  Divisor units;  // how many units of eight columns a row has
};

// out[t] = sum of weights[t, j] * y[token_to_row[t, j]] over j: products and sums each rounded to FP32.
// With an addend, out[t] = (that, rounded to BF16) + addend[t], as PyTorch adds tensors of BF16.
// kAtOnce: choices whose rows are in flight together.
// Grid: a thread owns eight neighbouring columns of a token; neighbouring threads the next ones.
// Shared memory: none.
// Barriers: none.
// Alignment: y and its rows are at multiples of 16 B; vectorized if out and addend are too and H is one of 8; else any.
template <Input kWeights, bool kVectorized, int kAtOnce = 8>
__global__ void __launch_bounds__(256) combine_kernel(const __grid_constant__ Arguments args) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x, token = args.units.quotient(index);
  const uint32_t column = (index - token * args.units.value) * 8;
  if (token >= args.num_tokens) return;
  const int* token_to_row = args.token_to_row + static_cast<int64_t>(token) * args.top_k;
  const uint8_t* token_weights = args.weights + token * args.weight_token_bytes;
  const int64_t target_row = static_cast<int64_t>(token) * args.hidden_size * 2;

  Eight<Input::kBFloat16> addend;
  if (args.addend != nullptr) {  // older than the previous kernel, as plan and top_k_weights are
    if constexpr (kVectorized) {
      addend.load_once(args.addend + target_row, column);
    } else {
      addend.load<false>(args.addend + target_row, column, args.hidden_size);
    }
  }
  float sums[8] = {};
  for (uint32_t first = 0; first < args.top_k; first += kAtOnce) {
    int rows[kAtOnce];
    float weights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t choice = min(first + i, args.top_k - 1);
      rows[i] = token_to_row[choice];
      weights[i] = load_float<kWeights>(token_weights + choice * args.weight_choice_bytes);
    }
    if (first == 0) {  // plan and top_k_weights are older than the previous kernel
      wait_for_previous_kernel();
      let_next_kernel_start();
    }
    Eight<Input::kBFloat16> values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // A choice without a row reads any row: no load has a condition, so that all are in flight at once.
      values[i].load_once(args.y + max(rows[i], 0) * args.y_row_bytes, column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (rows[i] < 0 || first + i >= args.top_k) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] = __fadd_rn(sums[j], __fmul_rn(weights[i], values[i][j]));
    }
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = pack_bf16(sums[2 * i], sums[2 * i + 1]);
    if (args.addend == nullptr) continue;
    const float low = __uint_as_float(words[i] << 16), high = __uint_as_float(words[i] & 0xffff0000);
    words[i] = pack_bf16(__fadd_rn(low, addend[2 * i]), __fadd_rn(high, addend[2 * i + 1]));
  }
  uint8_t* target = args.out + target_row + column * 2;
  if constexpr (kVectorized) {
    *reinterpret_cast<uint4*>(target) = {words[0], words[1], words[2], words[3]};
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (column + j < args.hidden_size) reinterpret_cast<uint16_t*>(target)[j] = words[j / 2] >> j % 2 * 16;
    }
  }
}
