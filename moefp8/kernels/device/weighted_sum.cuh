// The weighted sum of a token's rows, in FP32 and in the order of its choices.
#pragma once
#include "fp8.cuh"
#include "input.cuh"

// sums[i] = sum of weights[t, j] * y[token_to_row[t, j], column + i] over j: products and sums each rounded to FP32.
//
// args: y, bf16 [R, H], whose rows are y_row_bytes apart; token_to_row, int [T, top_k], -1 for no row; weights,
// [T, top_k] with weight_token_bytes and weight_choice_bytes from one to the next. y is what the previous kernel makes:
// the function waits for that, and lets the next one start. All else is older.
// kAtOnce: choices whose rows are in flight together. Returns whether a choice has a row.
template <Input kWeights, int kAtOnce = 8, class Arguments>
__device__ inline bool weighted_sum(const Arguments& args, uint32_t token, uint32_t column, float (&sums)[8]) {
  const int* token_to_row = args.token_to_row + static_cast<int64_t>(token) * args.top_k;
  const uint8_t* token_weights = args.weights + token * args.weight_token_bytes;
  bool has_row = false;
  for (uint32_t first = 0; first < args.top_k; first += kAtOnce) {
    int rows[kAtOnce];
    float weights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t choice = min(first + i, args.top_k - 1);
      rows[i] = token_to_row[choice];
      weights[i] = load_float<kWeights>(token_weights + choice * args.weight_choice_bytes);
      has_row |= rows[i] >= 0;
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
  return has_row;
}
