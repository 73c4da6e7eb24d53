// A block of weights becomes E4M3 codes, as they lie and, if asked for, transposed: what kernels of weights share.
#pragma once
#include "fp8.cuh"
#include "transpose.cuh"

constexpr int kLanes = 8;                     // neighbouring threads share four rows
constexpr int kVectors = kTile / 8 / kLanes;  // of eight elements, which a thread has in each of its rows
constexpr int kTileWords = kTile * kTile / 4;

// scale_inv = max(amax |block|, 1e-4) / 448; data = w / scale_inv in E4M3; transposed[c, r] = data[r, c] for
// r < num_rows, 0 for the other r < width <= num_rows rounded up to 128. One CTA of kThreads threads does a block.
// `memory` is shared: with kTransposed 16 KB for the codes as rows of `transposed`, then 32 B for the largest
// magnitude of each warp, which are all that is needed without. Chunk j of row c lies at j ^ c / 8 % 8: no bank is met
// twice. Alignment: vectorized if w and its pitch, `transposed`, width and its pitch are multiples of 16 B, data of 8 B
// and k of 8; else any.
//
// args: num_rows, k and width of what has blocks of its own, and for a tile of it
//   first_weight(tile), row_pitch<kInput>()        its first weight, and bytes from one row of weights to the next
//   first_code(tile)                               its first code in `data`, without gaps
//   scale()                                        the scale of the block that the CTA owns
//   first_transposed(tile), transposed_row_pitch   its first code in W^T, and bytes from one row to the next
template <Input kInput, bool kVectorized, bool kTransposed, class Arguments>
__device__ inline void quantize_block(const Arguments& args, const Tile& tile, int* memory) {
  uint32_t* warp_amax = reinterpret_cast<uint32_t*>(memory) + (kTransposed ? kTileWords : 0);
  const uint32_t line = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t first_row = tile.first_row + line * 4, width = min(args.k - tile.first_column, kTile);
  const uint8_t* source = args.first_weight(tile) + static_cast<int64_t>(tile.first_column) * Eight<kInput>::kElementBytes;
  // No load has a condition, so that all are in flight at once: a row that does not exist repeats the last one, which
  // changes no largest magnitude.
  Eight<kInput> x[4][kVectors];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint8_t* row = source + min(first_row + i, args.num_rows - 1) * args.template row_pitch<kInput>();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) x[i][j].template load<kVectorized>(row, (j * kLanes + lane) * 8, width);
  }
  uint32_t largest = x[0][0].largest();
#pragma unroll
  for (int i = 1; i < 4 * kVectors; ++i) {
    largest = Eight<kInput>::larger(largest, x[i / kVectors][i % kVectors].largest());
  }
  warp_amax[threadIdx.x / kWarp] = __reduce_max_sync(0xffffffff, Eight<kInput>::amax(largest));
  __syncthreads();
  const Scale scale(__reduce_max_sync(0xffffffff, warp_amax[threadIdx.x % (kThreads / kWarp)]), false);
  if (threadIdx.x == 0) *args.scale(tile) = scale.scale_inv;

  uint8_t* data = args.first_code(tile) + static_cast<int64_t>(first_row) * args.k + tile.first_column;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const uint32_t column = (j * kLanes + lane) * 8;
    uint32_t codes[2][4];  // of four neighbouring columns, then of four more
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      uint2 eight = x[i][j].e4m3(scale);
      if (first_row + i >= args.num_rows) {
        eight = {};
      } else if (column < width) {
        Eight<kInput>::template store<kVectorized>(data + i * static_cast<int64_t>(args.k), column, width, eight);
      }
      codes[0][i] = eight.x, codes[1][i] = eight.y;
    }
    if constexpr (kTransposed) {
      int* target = memory + column * (kTile / 4) + (line / 4 ^ lane) * 4 + line % 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t of_columns[4];
        transpose_4x4(codes[half], of_columns);
#pragma unroll
        for (int i = 0; i < 4; ++i) target[(half * 4 + i) * (kTile / 4)] = of_columns[i];
      }
    }
  }
  if constexpr (kTransposed) {
    __syncthreads();
    store_transposed<kVectorized>(memory, args.first_transposed(tile), args.transposed_row_pitch, args.k, args.width, tile,
                                  [](uint32_t column) { return column / 8 % kLanes; });
  }
}
