// What kernels that transpose codes share: tiles of parts, 16 codes of a row, and squares of 4x4 codes.
#pragma once
#include "divisor.cuh"

constexpr int kTile = 128;                // rows and columns of a tile, and bytes of a line
constexpr int kChunk = 16;                // codes that a thread loads or stores at once
constexpr int kChunks = kTile / kChunk;   // neighbouring threads move a line
constexpr int kThreads = kTile / 4 * kChunks;
constexpr int kRowStep = kThreads / kChunks;  // rows of what is transposed that a CTA stores at once

// 128 rows and 128 columns of a part of a matrix; a part is gate or up, say. Tiles are counted along the columns, then
// along the rows, then over parts and matrices.
struct Tile {
  uint32_t matrix, part, first_row, first_column;

  __device__ Tile(const Divisor& num_column_tiles, const Divisor& num_row_tiles, const Divisor& num_parts,
                  uint32_t index) {
    const uint32_t row_tiles = num_column_tiles.quotient(index);
    const uint32_t parts = num_row_tiles.quotient(row_tiles);
    first_column = (index - row_tiles * num_column_tiles.value) * kTile;
    first_row = (row_tiles - parts * num_row_tiles.value) * kTile;
    matrix = num_parts.quotient(parts);
    part = parts - matrix * num_parts.value;
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

// Stores a tile that lies transposed in shared memory, 128 B a row, into [k, width] from (tile.first_column,
// tile.first_row) on, and nothing past its ends. Chunk j of row c of shared memory is codes 16 (j ^ key(c)) and on.
// All kThreads threads call it; alignment is that of `Chunk::store`, with `row_pitch`.
template <bool kVectorized, class Key>
__device__ inline void store_transposed(const int* memory, uint8_t* out, int64_t row_pitch, uint32_t k, uint32_t width,
                                        const Tile& tile, const Key& key) {
  const uint32_t line = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
#pragma unroll
  for (int i = 0; i < kTile / kRowStep; ++i) {
    const uint32_t in_tile = line + i * kRowStep, row = tile.first_column + in_tile;
    const uint4 four = reinterpret_cast<const uint4*>(memory)[in_tile * kChunks + (chunk ^ key(in_tile))];
    const Chunk codes = {four.x, four.y, four.z, four.w};
    codes.store<kVectorized>(out + row * row_pitch, tile.first_row + chunk * kChunk, row < k ? width : 0);
  }
}
