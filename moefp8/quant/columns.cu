// Quantize to E4M3 with one FP32 scale for 128 tokens of a feature, or of 128 features, on Hopper; the codes of a
// feature's tokens lie side by side. If wanted, also with one for 128 features of a token, reading each element once.
//
// A CTA owns a tile: 128 features of up to 128 tokens of one expert. It finds the expert on the device. A thread holds
// eight rows of eight features, which wait in registers until their scales are known: 32 of them if x is BF16.
#include "columns.cuh"
#include "divisor.cuh"

struct Arguments {
  const uint8_t* x;           // [num_tokens, k]
  const int* expert_offsets;  // [num_experts + 1]; null: all rows are of one
  const int* row_to_token;    // [num_rows]; null: row r is x[r]
  uint8_t* data;              // [blocks, k, 128]
  float* scale_inv;           // [blocks, pitch]; of each row k are written, or k / 128 if kBlocks
  uint8_t* row_data;          // [num_rows, k]
  float* row_scale_inv;       // [k / 128, row_pitch], rows innermost
  int64_t pitch, row_pitch;
  uint32_t row_bytes;         // the pitch of rows in x
  uint32_t k, num_tokens, num_rows, num_experts;
  Divisor num_k_blocks;
  uint32_t ue8m0;   // whether scales are rounded up to powers of two
  float min_amax;   // a block's largest magnitude counts as at least this
};

// The rows of a block.
struct Rows {
  uint32_t first, count;  // count is 0 in a block that no expert has

  // Expert e has the blocks from s_e = expert_offsets[e] / 128 + e on. These rise strictly, so this one is of the last
  // expert whose blocks begin at or before it, or of nobody. All threads of the CTA call it; whatever the offsets are,
  // all rows exist. To load the offsets takes one trip to memory; then two of them come from the L1 cache.
  __device__ static Rows of(const Arguments& args, uint32_t block) {
    if (args.expert_offsets == nullptr) return between(args, 0, args.num_rows, block);
    int expert = -1;
    for (uint32_t first = 0; first < args.num_experts; first += kTileThreads) {
      const uint32_t e = first + threadIdx.x;
      const bool begins_before = e < args.num_experts && first_block(args.expert_offsets[e], e) <= block;
      expert += __syncthreads_count(begins_before);
    }
    if (expert < 0) return {};
    const int begin = max(args.expert_offsets[expert], 0), end = max(args.expert_offsets[expert + 1], 0);
    const uint32_t first = first_block(begin, expert);
    return block < first ? Rows{} : between(args, begin, end, block - first);
  }

 private:
  __device__ static uint32_t first_block(int offset, uint32_t expert) {
    return static_cast<uint32_t>(max(offset, 0)) / kTileSize + expert;
  }
  __device__ static Rows between(const Arguments& args, uint32_t begin, uint32_t end, uint32_t block) {
    const int64_t first = begin + static_cast<int64_t>(block) * kTileSize;
    const int64_t count = min(end, args.num_rows) - first;
    if (count <= 0) return {};
    return {static_cast<uint32_t>(first), static_cast<uint32_t>(min(count, static_cast<int64_t>(kTileSize)))};
  }
};

// What a thread holds of the tile: eight rows of eight neighbouring features.
template <Input kInput>
struct Part {
  Eight<kInput> x[8];

  // Loads rows first_row to first_row + 7 of the tile; `source` has its first feature of token 0. No load waits for
  // another, so that all are in flight at once: a row behind the last one repeats it, and so do columns behind the end
  // of a row, which changes no largest magnitude. A row without a token has zeros.
  template <bool kVectorized>
  __device__ void load(const Arguments& args, const Rows& rows, const uint8_t* source, uint32_t first_row,
                       uint32_t column, uint32_t width) {
    if (args.row_to_token == nullptr) {
      source += static_cast<uint64_t>(rows.first) * args.row_bytes;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        load_row<kVectorized>(args, i, source, min(first_row + i, rows.count - 1), column, width);
      }
    } else {
      const int* tokens = args.row_to_token + rows.first;
      uint32_t token[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) token[i] = tokens[min(first_row + i, rows.count - 1)];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (token[i] < args.num_tokens) load_row<kVectorized>(args, i, source, token[i], column, width);
      }
    }
  }

  // The codes of the eight rows of a column, the first in the lowest byte.
  __device__ uint2 column_codes(int column, const Divider& scale) const {
    const auto four = [&](int i) {
      return encode_e4m3(scale.divide(x[i][column]), scale.divide(x[i + 1][column]), scale.divide(x[i + 2][column]),
                         scale.divide(x[i + 3][column]));
    };
    return {four(0), four(4)};
  }

 private:
  template <bool kVectorized>
  __device__ void load_row(const Arguments& args, int i, const uint8_t* source, uint32_t row, uint32_t column,
                           uint32_t width) {
    x[i].template load<kVectorized>(source + static_cast<uint64_t>(row) * args.row_bytes, column, width);
  }
};

// One block of 128 rows (tokens of an expert) and 128 features, with amax over either of these, or over both:
//   scale_inv[b, f] = max(amax |x[rows of b, f]|, min_amax) / 448; data[b, f, :] = x[rows of b, f] / scale_inv in E4M3;
//   kBlocks: instead scale_inv[b, j], of x[rows of b, 128 j + 0..127], for all features of j;
//   kWithRows: row_scale_inv[r, j] and row_data[r, :] likewise, of x[r, 128 j + 0..127].
// Grid: a CTA of 256 threads owns a block; neighbouring CTAs the next one along K. Blocks without rows end at once.
// Shared memory: 4 KB (8 KB if x is FP32) for largest magnitudes of columns, or 32 B for that of a block, 8 KB for
//   those of rows, 1 KB for scales of columns and 1 KB for those of rows, 16 KB for codes of columns.
// Barriers: one for every 256 experts; then largest magnitudes -> scales -> codes; kBlocks: largest magnitudes -> codes
//   and scales of rows.
// Alignment: vectorized if x and its rows are at multiples of 16 B and K of 8 elements; else any. `data` is at a
//   multiple of 16 B.
template <Input kInput, bool kBlocks, bool kWithRows, bool kVectorized>
__global__ void __launch_bounds__(kTileThreads, kVectorized && kInput != Input::kFloat ? 4 : 2)
    columns_kernel(const __grid_constant__ Arguments args) {
  __shared__ ColumnAmax<kInput> column_amax;
  __shared__ TileAmax<kInput> tile_amax;
  __shared__ RowAmax<kInput> row_amax;
  __shared__ TileDividers column_dividers, row_dividers;
  __shared__ TileCodes codes;
  const uint32_t block = args.num_k_blocks.quotient(blockIdx.x);
  const uint32_t k_block = blockIdx.x - block * args.num_k_blocks.value;
  const uint32_t first_column = k_block * kTileSize, width = min(args.k - first_column, kTileSize);
  const TilePlace place;
  const uint32_t first_row = place.row_group * 8, column = place.column_group * 8;

  wait_for_previous_kernel();
  let_next_kernel_start();

  const Rows rows = Rows::of(args, block);
  if (rows.count == 0) return;
  const bool has_rows = first_row < rows.count;
  Part<kInput> part = {};
  if (has_rows) {
    const uint8_t* source = args.x + static_cast<uint64_t>(first_column) * Eight<kInput>::kElementBytes;
    part.template load<kVectorized>(args, rows, source, first_row, column, width);
  }

  if constexpr (!kBlocks) {
    uint32_t of_columns[Eight<kInput>::kWords];
#pragma unroll
    for (int j = 0; j < Eight<kInput>::kWords; ++j) {
      of_columns[j] = part.x[0].words[j];
#pragma unroll
      for (int i = 1; i < 8; ++i) of_columns[j] = Eight<kInput>::larger(of_columns[j], part.x[i].words[j]);
    }
    column_amax.tell(place, of_columns);
  }
  if constexpr (kBlocks || kWithRows) {
    uint32_t of_rows[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) of_rows[i] = part.x[i].largest();
    if constexpr (kBlocks) {
      uint32_t of_all = of_rows[0];
#pragma unroll
      for (int i = 1; i < 8; ++i) of_all = Eight<kInput>::larger(of_all, of_rows[i]);
      tile_amax.tell(of_all);
    }
    if constexpr (kWithRows) row_amax.tell(place, of_rows);
  }
  __syncthreads();

  // A thread for each column, and one for each row.
  const uint32_t index = threadIdx.x % kTileSize;
  if (threadIdx.x < kTileSize) {
    if constexpr (!kBlocks) {
      const Scale scale(column_amax.of(index), args.ue8m0, args.min_amax);
      column_dividers.tell(index, scale);
      if (index < width) args.scale_inv[block * args.pitch + first_column + index] = scale.scale_inv;
    }
  } else if constexpr (kWithRows) {
    const Scale scale(row_amax.of(index), args.ue8m0, args.min_amax);
    row_dividers.tell(index, scale);
    if (index < rows.count) args.row_scale_inv[k_block * args.row_pitch + rows.first + index] = scale.scale_inv;
  }

  if constexpr (kBlocks) {
    const Scale scale(tile_amax.of_tile(), args.ue8m0, args.min_amax);
    if (threadIdx.x == 0) args.scale_inv[block * args.pitch + k_block] = scale.scale_inv;
    if (has_rows) {
#pragma unroll
      for (int i = 0; i < 8; ++i) codes.tell(place, i, part.column_codes(i, scale));
    }
  } else {
    __syncthreads();
    if (has_rows) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        Divider two[2];
        column_dividers.two_of(place.column_group, i / 2, two[0], two[1]);
        codes.tell(place, i, part.column_codes(i, two[0]));
        codes.tell(place, i + 1, part.column_codes(i + 1, two[1]));
      }
    }
  }
  __syncthreads();
  codes.store(args.data + (static_cast<uint64_t>(block) * args.k + first_column) * kTileSize, width, rows.count);

  if constexpr (kWithRows) {
    const uint32_t end = column < width ? rows.count : 0;
    const uint64_t row = static_cast<uint64_t>(rows.first) + first_row;
    uint8_t* target = args.row_data + row * args.k + first_column;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      Divider two[2];
      row_dividers.two_of(place.row_group, i / 2, two[0], two[1]);
#pragma unroll
      for (int j = i; j < i + 2; ++j) {
        const uint2 of_row = part.x[j].e4m3(two[j - i]);
        uint8_t* place_of_row = target + static_cast<uint64_t>(j) * args.k;
        if (first_row + j < end) Eight<kInput>::template store<kVectorized>(place_of_row, column, width, of_row);
      }
    }
  }
}
