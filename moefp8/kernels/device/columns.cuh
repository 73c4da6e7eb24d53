// Codes of 128 rows of a feature at a time: what the threads of a CTA share of a tile of 128 rows and 128 columns, to
// find the largest magnitudes of its rows, of its columns or of all, and to store its codes with the rows innermost.
//
// A thread has eight neighbouring rows and eight neighbouring columns. It tells its largest magnitudes; behind a
// barrier one thread for each row and each column makes a scale of them, and stores it; behind a second barrier all
// divide. Where a tile has one scale, each thread makes it behind the first barrier, and divides at once. `TilePlace`
// gives 256 threads their places such that no bank of shared memory is met twice.
#pragma once
#include "fp8.cuh"

constexpr int kTileSize = 128;                      // rows and columns of a tile
constexpr int kTileGroups = kTileSize / 8;          // of eight rows or columns
constexpr int kTileThreads = kTileGroups * kTileGroups;

// Which eight rows and which eight columns the thread has. A quarter of a warp reads eight groups of columns, so a warp
// reads two whole lines of BF16 at once; half a warp writes codes of two groups of rows, which share 16 B.
struct TilePlace {
  uint32_t row_group, column_group;

  __device__ TilePlace()
      : row_group(threadIdx.x / kWarp * 2 + threadIdx.x / 8 % 2),
        column_group(threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8) {}
};

// The largest magnitudes of the columns of a tile. Shared memory: 4 KB of halves, 8 KB of FP32.
template <Input kInput>
struct ColumnAmax {
  static constexpr int kWords = Eight<kInput>::kWords;
  uint4 memory[kTileGroups][kTileGroups * kWords / 4];  // groups of rows, then columns

  // What `Eight::larger` has found word by word: the largest magnitudes of eight columns over the thread's rows.
  __device__ void tell(const TilePlace& place, const uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      memory[place.row_group][(place.column_group * kWords + i) / 4] = {words[i], words[i + 1], words[i + 2],
                                                                        words[i + 3]};
    }
  }

  // The FP32 bits of the largest magnitude of a column, behind a barrier.
  __device__ uint32_t of(uint32_t column) const {
    const uint32_t index = column * kWords / 8;
    uint32_t word = words_of(0)[index];
#pragma unroll
    for (int i = 1; i < kTileGroups; ++i) word = Eight<kInput>::larger(word, words_of(i)[index]);
    if constexpr (kInput != Input::kFloat) word &= column % 2 ? 0xffff0000 : 0xffff;
    return Eight<kInput>::amax(word);
  }

 private:
  __device__ const uint32_t* words_of(int row_group) const {
    return reinterpret_cast<const uint32_t*>(memory[row_group]);
  }
};

// The largest magnitudes of the rows of a tile. Shared memory: 8448 B; the 16 B behind a group's rows turn its banks.
template <Input kInput>
struct RowAmax {
  static constexpr int kPitch = kTileSize / 4 + 1;
  uint4 memory[kTileGroups][kPitch];  // groups of columns, then rows

  // words: of each of the thread's eight rows, what `Eight::largest` has found.
  __device__ void tell(const TilePlace& place, const uint32_t (&words)[8]) {
    uint4* target = memory[place.column_group] + place.row_group * 2;
    target[0] = {words[0], words[1], words[2], words[3]};
    target[1] = {words[4], words[5], words[6], words[7]};
  }

  // The FP32 bits of the largest magnitude of a row, behind a barrier.
  __device__ uint32_t of(uint32_t row) const {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(memory[0]) + row;
    uint32_t word = words[0];
#pragma unroll
    for (int i = 1; i < kTileGroups; ++i) word = Eight<kInput>::larger(word, words[i * kPitch * 4]);
    return Eight<kInput>::amax(word);
  }
};

// The largest magnitude of a tile. Shared memory: 32 B, a word for each warp.
template <Input kInput>
struct TileAmax {
  uint32_t memory[kTileThreads / kWarp];

  // word: what `Eight::larger` has found of all that the thread has. All kTileThreads threads call it.
  __device__ void tell(uint32_t word) {
    memory[threadIdx.x / kWarp] = __reduce_max_sync(0xffffffff, Eight<kInput>::amax(word));
  }

  // The FP32 bits of the largest magnitude, behind a barrier. All threads of a warp call it.
  __device__ uint32_t of_tile() const {
    return __reduce_max_sync(0xffffffff, memory[threadIdx.x % (kTileThreads / kWarp)]);
  }
};

// What divides 128 rows, or 128 columns. Shared memory: 1 KB. The i-th two of each group of eight lie side by side.
struct TileDividers {
  uint4 memory[4][kTileGroups];

  __device__ void tell(uint32_t index, const Divider& divider) {
    uint2* target = reinterpret_cast<uint2*>(&memory[index / 2 % 4][index / 8]) + index % 2;
    *target = {__float_as_uint(divider.divisor), __float_as_uint(divider.reciprocal)};
  }

  // Those of rows or columns 2 i and 2 i + 1 of a group, behind a barrier.
  __device__ void two_of(uint32_t group, int i, Divider& first, Divider& second) const {
    const uint4 both = memory[i][group];
    first = {__uint_as_float(both.x), __uint_as_float(both.y)};
    second = {__uint_as_float(both.z), __uint_as_float(both.w)};
  }
};

// The codes of a tile, rows innermost. Shared memory: 16 KB; rows 16 j to 16 j + 15 of column c lie at j ^ c / 8 % 8.
struct TileCodes {
  static constexpr int kChunks = kTileSize / 16;
  uint4 memory[kTileSize][kChunks];

  // codes: those of eight rows of the i-th of the thread's columns, the first in the lowest byte.
  __device__ void tell(const TilePlace& place, int i, uint2 codes) {
    uint4* chunk = memory[place.column_group * 8 + i] + (place.row_group / 2 ^ place.column_group % 8);
    reinterpret_cast<uint2*>(chunk)[place.row_group % 2] = codes;
  }

  // Stores the columns before num_columns to data [columns, 128], behind a barrier. Codes of rows from num_rows on
  // become zeros up to the next multiple of 32, behind which nothing is stored. All kTileThreads threads call it, a
  // warp for 512 B in a row; `data` is at a multiple of 16 B.
  __device__ void store(uint8_t* data, uint32_t num_columns, uint32_t num_rows) const {
    constexpr uint32_t kStep = kTileThreads / kChunks;
    const uint32_t chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
    if (chunk * 16 >= (num_rows + 31) / 32 * 32) return;
    const bool is_whole = num_rows == kTileSize;
    uint4 exists = {};  // ones in the bytes of rows that do
    if (!is_whole) {
      const uint32_t begin = chunk * 16, end = max(num_rows, begin) - begin;
      exists = {before(end, 0), before(end, 4), before(end, 8), before(end, 12)};
    }
    uint4* target = reinterpret_cast<uint4*>(data) + threadIdx.x;
#pragma unroll
    for (uint32_t i = 0; i < kTileSize / kStep; ++i) {
      const uint32_t column = first + i * kStep;
      uint4 codes = memory[column][chunk ^ column / 8 % 8];
      if (!is_whole) codes.x &= exists.x, codes.y &= exists.y, codes.z &= exists.z, codes.w &= exists.w;
      if (column < num_columns) target[i * kTileThreads] = codes;
    }
  }

 private:
  // Ones in the bytes of a word that come before `end`; its first byte is `first`.
  __device__ static uint32_t before(uint32_t end, uint32_t first) {
    return end >= first + 4 ? 0xffffffff : end <= first ? 0 : (1u << (end - first) * 8) - 1;
  }
};
