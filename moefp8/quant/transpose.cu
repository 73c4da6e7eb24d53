// Transpose codes of weights, one byte each, on Hopper: 128x128 blocks keep their scales, whose grid is transposed too.
//
// w is matrices of parts of rows; a part is gate or up, say. A tile has 128 rows and 128 columns of a part. Registers
// turn 4x4 codes at a time, and shared memory turns these squares, so that both sides move whole lines of 128 B.
#include "divisor.cuh"

constexpr int kTile = 128;                // rows and columns of a tile, and bytes of a line
constexpr int kChunk = 16;                // codes that a thread loads or stores at once
constexpr int kChunks = kTile / kChunk;   // neighbouring threads move a line
constexpr int kThreads = kTile / 4 * kChunks;
constexpr int kRowStep = kThreads / kChunks;  // rows of `out` that a CTA stores at once

struct Arguments {
  const uint8_t* w;                                   // [matrices, parts, num_rows, k]
  uint8_t* out;                                       // [matrices, k, parts, width]
  int64_t w_matrix_pitch, w_part_pitch, w_row_pitch;  // in bytes, as those of `out`
  int64_t out_matrix_pitch, out_row_pitch;
  uint32_t num_rows, k, width;  // of a part; columns of `out` from num_rows to width become zeros
  Divisor num_k_tiles, num_row_tiles, num_parts;  // how many a row has, a part as wide as `width`, and a matrix
};

// Tiles are counted along K, then along the rows, then over parts and matrices.
struct Tile {
  uint32_t matrix, part, first_row, first_column;

  __device__ Tile(const Arguments& args, uint32_t index) {
    const uint32_t row_tiles = args.num_k_tiles.quotient(index);
    const uint32_t parts = args.num_row_tiles.quotient(row_tiles);
    first_column = (index - row_tiles * args.num_k_tiles.value) * kTile;
    first_row = (row_tiles - parts * args.num_row_tiles.value) * kTile;
    matrix = args.num_parts.quotient(parts);
    part = parts - matrix * args.num_parts.value;
  }
};

// Neighbouring codes of a row, four to a word.
struct Chunk {
  uint32_t words[kChunk / 4];

  // Those of a row of `width` codes from `column` on, zeros past its end. If kVectorized, `width` and the address of
  // `row` are multiples of 16; else any. The same holds for `store`.
  template <bool kVectorized>
  __device__ void load(const uint8_t* row, uint32_t column, uint32_t width) {
    if constexpr (kVectorized) {
      uint4 four = {};
      if (column < width) four = *reinterpret_cast<const uint4*>(row + column);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const uint32_t code = column + i < width ? row[column + i] : 0;
        words[i / 4] = i % 4 ? words[i / 4] | code << i % 4 * 8 : code;
      }
    }
  }

  template <bool kVectorized>
  __device__ void store(uint8_t* row, uint32_t column, uint32_t width) const {
    if constexpr (kVectorized) {
      if (column < width) *reinterpret_cast<uint4*>(row + column) = {words[0], words[1], words[2], words[3]};
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (column + i < width) row[column + i] = words[i / 4] >> i % 4 * 8;
      }
    }
  }
};

// The i-th code of each of four rows becomes the i-th word, its first row in the lowest byte.
__device__ inline void transpose_4x4(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // two of the four codes
    const uint32_t pairs = half ? 0x7362 : 0x5140;
    const uint32_t upper = __byte_perm(rows[0], rows[1], pairs), lower = __byte_perm(rows[2], rows[3], pairs);
    columns[2 * half] = __byte_perm(upper, lower, 0x5410);
    columns[2 * half + 1] = __byte_perm(upper, lower, 0x7632);
  }
}

// out[m, c, p, r] = w[m, p, r, c] for r < num_rows, 0 for the other r < width.
// Grid: one CTA of 256 threads owns one tile; neighbouring CTAs the next one along K.
// Shared memory: 16 KB, the tile as rows of `out`. Chunk j of row c lies at j ^ c / 16: no bank is met twice.
// Barriers: one, between the writes of the tile and its reads.
// Alignment: vectorized if w, out, k, width and all pitches are multiples of 16 B; else any.
template <bool kVectorized>
__global__ void __launch_bounds__(kThreads) transpose_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(16) int memory[];
  const Tile tile(args, blockIdx.x);
  const uint32_t line = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;

  wait_for_previous_kernel();
  let_next_kernel_start();

  const uint8_t* source = args.w + tile.matrix * args.w_matrix_pitch + tile.part * args.w_part_pitch;
  Chunk rows[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = tile.first_row + line * 4 + i;
    const uint32_t width = row < args.num_rows ? args.k : 0;
    rows[i].load<kVectorized>(source + row * args.w_row_pitch, tile.first_column + chunk * kChunk, width);
  }
  int* target = memory + chunk * kChunk * (kTile / 4) + (line / 4 ^ chunk) * 4 + line % 4;
#pragma unroll
  for (int i = 0; i < kChunk / 4; ++i) {
    const uint32_t of_rows[] = {rows[0].words[i], rows[1].words[i], rows[2].words[i], rows[3].words[i]};
    uint32_t of_columns[4];
    transpose_4x4(of_rows, of_columns);
#pragma unroll
    for (int j = 0; j < 4; ++j) target[(i * 4 + j) * (kTile / 4)] = of_columns[j];
  }
  __syncthreads();
  uint8_t* out = args.out + tile.matrix * args.out_matrix_pitch + static_cast<int64_t>(tile.part) * args.width;
#pragma unroll
  for (int i = 0; i < kTile / kRowStep; ++i) {
    const uint32_t in_tile = line + i * kRowStep, row = tile.first_column + in_tile;
    const uint4 four = reinterpret_cast<const uint4*>(memory)[in_tile * kChunks + (chunk ^ in_tile / kChunk)];
    const Chunk codes = {four.x, four.y, four.z, four.w};
    const uint32_t width = row < args.k ? args.width : 0;
    codes.store<kVectorized>(out + row * args.out_row_pitch, tile.first_row + chunk * kChunk, width);
  }
}
