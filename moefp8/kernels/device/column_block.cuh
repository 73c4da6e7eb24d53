// Which rows a block of column codes has: up to 128 of one expert.
#pragma once
#include "base.cuh"

// The rows of block `index`. Expert e has the blocks from offsets[e] / 128 + e on. These rise strictly, so the last
// expert whose blocks begin at or before this one has it, or nobody: then num_rows is 0. Whatever the offsets are, all
// rows are in [0, total).
struct ColumnBlock {
  static constexpr int kRows = 128;
  uint32_t first_row = 0, num_rows = 0;

  // offsets: [num_experts + 1]. All threads of the CTA call it. The loads of all offsets take one trip to memory.
  __device__ ColumnBlock(const int* offsets, uint32_t num_experts, uint32_t total, uint32_t index) {
    const auto row_of = [&](uint32_t expert) { return static_cast<uint32_t>(max(offsets[expert], 0)); };
    uint32_t num_begun = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < num_experts; first += blockDim.x) {
      const uint32_t expert = first + threadIdx.x;
      num_begun += __syncthreads_count(expert < num_experts && row_of(expert) / kRows + expert <= index);
    }
    if (num_begun == 0) return;
    const uint32_t expert = num_begun - 1, begin = row_of(expert), end = min(row_of(num_begun), total);
    const uint32_t first_block = begin / kRows + expert;
    if (index < first_block || begin >= end || index - first_block > (end - begin - 1) / kRows) return;
    first_row = begin + (index - first_block) * kRows;
    num_rows = min(end - first_row, static_cast<uint32_t>(kRows));
  }
};
