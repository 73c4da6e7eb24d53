// Transpose codes of weights, one byte each, on Hopper: 128x128 blocks keep their scales, whose grid is transposed too.
//
// w is matrices of parts of rows; a part is gate or up, say. A tile has 128 rows and 128 columns of a part. Registers
// turn 4x4 codes at a time, and shared memory turns these squares, so that both sides move whole lines of 128 B.
#include "transpose.cuh"

struct Arguments {
  const uint8_t* w;                                   // [matrices, parts, num_rows, k]
  uint8_t* out;                                       // [matrices, k, parts, width]
  int64_t w_matrix_pitch, w_part_pitch, w_row_pitch;  // in bytes, as those of `out`
  int64_t out_matrix_pitch, out_row_pitch;
  uint32_t num_rows, k, width;  // of a part; columns of `out` from num_rows to width become zeros
  Divisor num_k_tiles, num_row_tiles, num_parts;  // how many a row has, a part as wide as `width`, and a matrix
};

// out[m, c, p, r] = w[m, p, r, c] for r < num_rows, 0 for the other r < width.
// Grid: one CTA of 256 threads owns one tile; neighbouring CTAs the next one along K.
// Shared memory: 16 KB, the tile as rows of `out`. Chunk j of row c lies at j ^ c / 16: no bank is met twice.
// Barriers: one, between the writes of the tile and its reads.
// Alignment: vectorized if w, out, k, width and all pitches are multiples of 16 B; else any.
template <bool kVectorized>
__global__ void __launch_bounds__(kThreads) transpose_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(16) int memory[];
  const Tile tile(args.num_k_tiles, args.num_row_tiles, args.num_parts, blockIdx.x);
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
  store_transposed<kVectorized>(memory, out, args.out_row_pitch, args.k, args.width, tile,
                                [](uint32_t column) { return column / kChunk; });
}
