// The arguments of the three kernels of activation_columns.cu. T tokens, k choices each, E experts, R rows, I
// intermediate, B blocks of column codes.
#pragma once
#include "activation.cuh"
#include "divisor.cuh"

constexpr int kThreads = 256;  // of a CTA of each kernel

struct Arguments {
  const uint8_t* grad;       // bf16 [R, I]: the gradient of `a`, not yet times a weight
  int64_t grad_row_bytes;    // the pitch of its rows, a multiple of 16
  const uint8_t* saved;      // gate and up: bf16 [R, 2, I], or E4M3 [R, 2, I] without gaps
  int64_t saved_row_bytes;   // the pitch of rows of I
  const float* saved_scales; // [I/128, pitch], where row r has 2 r for gate and 2 r + 1 for up
  int64_t saved_scale_pitch;
  const int* expert_offsets; // [E + 1]
  const int* token_to_row;   // [T, k]; a choice has no row if this is not in [0, R)
  const uint8_t* weights;    // [T, k]
  int64_t weight_token_bytes, weight_choice_bytes;
  uint8_t* rows;             // E4M3 [R, 2, padded I]: gradients of gate and of up
  int64_t row_pitch;         // of [2, padded I]
  float* row_scales;         // [2 * padded I / 128, pitch], rows innermost
  int64_t scale_pitch;
  uint8_t* gate_up_columns;  // E4M3 [B, 2 I, 128]
  float* gate_up_scales;     // [B, pitch]
  int64_t gate_up_scale_pitch;
  uint8_t* activated_columns;  // E4M3 [B, I, 128]
  float* activated_scales;     // [B, pitch]; I of each row are written, or I / 128 with kBlocks
  int64_t activated_scale_pitch;
  float* weight_of_row;      // [R]; first 0 in rows of no choice. After the first kernel, -0 is a weight of 0
  int* row_to_token;         // [R], written by the first kernel for later gathers of tokens; null: not written
  float* partial_sums;       // [I/128, R]: <grad, a> of 128 columns
  float* of_weights;         // [T, k]
  float* is_first;           // [T, k]: 1 for the first choice of a row, 0 for others
  uint32_t num_choices, num_rows, num_experts, size;
  Divisor top_k, num_tiles;  // choices of a token, tiles of I
  ActivationArguments activation;
  float min_amax;
};
