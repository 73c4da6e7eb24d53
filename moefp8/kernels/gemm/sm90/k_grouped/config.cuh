// What tells one variant of `k_grouped_kernel` from another, and what the host gives to all of them.
#pragma once
#include "tma.cuh"

constexpr int kBlock = 128;  // tokens that have one scale and one promotion
constexpr int kStep = 32;    // tokens of one WGMMA

enum class Output { kBFloat16, kFloat, kAccumulate };  // the last one adds to what d holds in FP32

// The template argument of the kernel; config.py says what each field means.
struct KGroupedConfig {
  int warpgroups;           // of the math
  int parts;                // WGMMAs of 64 rows, one below the other, that each of them has of a tile
  int tile_n;               // columns of a tile
  int stages;
  int multicast;            // 2: the CTAs of a cluster have the same rows, and load half of them each, for both; else 1
  bool blocks_b;            // b has a scale for 128 features as well, not for each of them
  bool stages_output;       // tiles leave through shared memory by TMA, which d must allow; else from registers
  Output output;
  int shared_bytes;         // as the host counts them

  int tile_m = 64 * warpgroups * parts;
  int threads = (warpgroups + 1) * kWarpgroup;
  int stage_bytes = (tile_m + tile_n) * kBlock + (tile_m + (blocks_b ? 4 : tile_n)) * 4;
  int math_registers = warpgroups == 2 ? 240 : 160;
  int producer_registers = warpgroups == 2 ? 24 : 32;
  // Registers do not suffice to store a tile while products of the next one are under way.
  bool stores_first = !blocks_b;
  int element_bytes = output == Output::kBFloat16 ? 2 : 4;
  int box_n = 128 / element_bytes;  // columns of one TMA store: a span of the swizzle
  int output_boxes = tile_n / box_n;
  int output_buffers = stages_output ? (output == Output::kBFloat16 ? parts : 1) : 0;  // of each warpgroup
  int scales_b = blocks_b ? 4 : tile_n;  // in one box: TMA moves 16 bytes at least
};

struct Arguments {
  const int* expert_offsets;  // [E + 1]; null: there is one expert, with num_tokens
  uint8_t* d;                 // [E, M, N]
  int64_t d_matrix_bytes, d_row_bytes;
  int num_experts, num_tokens, m, n;
  int num_row_tiles, num_col_tiles;  // of clusters
  int band;                   // row tiles that are walked together, for the L2 cache
  int aligned;                // whether eight BF16 or two FP32 of a row of d can be written at once
};

// d: where tiles leave from registers, nobody reads it.
struct Maps {
  TensorMap a, b, a_scales, b_scales, d;
};
