// Quantize weights to E4M3 in blocks of 128x128 on Hopper, and write the codes twice: as they lie, and transposed.
//
// w is matrices of parts of rows; a part is gate or up, say, and its blocks begin at its first row. Each weight is read
// once, waits in registers until its block's scale is known, and leaves as two bytes.
#include "fp8.cuh"
#include "transpose.cuh"

constexpr int kLanes = 8;                     // neighbouring threads share four rows
constexpr int kVectors = kTile / 8 / kLanes;  // of eight elements, which a thread has in each of its rows
constexpr int kTileWords = kTile * kTile / 4;

struct Arguments {
  const uint8_t* w;                                   // [matrices, parts, num_rows, k]
  uint8_t* data;                                      // the same, without gaps
  float* scale_inv;                                   // [matrices, parts, row tiles, k tiles], without gaps
  uint8_t* transposed;                                // [matrices, k, parts, width]
  int64_t w_matrix_pitch, w_part_pitch, w_row_pitch;  // in bytes, as those of `transposed`
  int64_t transposed_matrix_pitch, transposed_row_pitch;
  uint32_t num_rows, k, width;  // of a part; columns of `transposed` from num_rows to width become zeros
  Divisor num_k_tiles, num_row_tiles, num_parts;  // how many a row has, a part, and a matrix
};

// scale_inv[m, p, i, j] = max(amax |block i, j of w[m, p]|, 1e-4) / 448; data = w / scale_inv in E4M3.
// transposed[m, c, p, r] = data[m, p, r, c] for r < num_rows, 0 for the other r < width <= num_rows rounded up to 128.
// Grid: one CTA of 256 threads owns one block; neighbouring CTAs the next one along K.
// Shared memory: 16 KB, the codes as rows of `transposed`, and 32 B, the largest magnitude of each warp. Chunk j of
// row c lies at j ^ c / 8 % 8: no bank is met twice.
// Barriers: one between magnitudes and the scale, one between the writes of the codes and their reads.
// Alignment: vectorized if w and its pitches, `transposed`, width and its pitches are multiples of 16 B, data of 8 B
// and k of 8; else any.
template <Input kInput, bool kVectorized>
__global__ void __launch_bounds__(kThreads) both_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(16) int memory[];
  uint32_t* warp_amax = reinterpret_cast<uint32_t*>(memory) + kTileWords;
  const Tile tile(args.num_k_tiles, args.num_row_tiles, args.num_parts, blockIdx.x);
  const uint32_t line = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t first_row = tile.first_row + line * 4, width = min(args.k - tile.first_column, kTile);

  // The next kernel may be a GEMM that reads its weights before it waits for its predecessor. These may be what is
  // written here, so nothing lets it start early.
  wait_for_previous_kernel();

  const uint8_t* source = args.w + tile.matrix * args.w_matrix_pitch + tile.part * args.w_part_pitch +
                          static_cast<int64_t>(tile.first_column) * Eight<kInput>::kElementBytes;
  // No load has a condition, so that all are in flight at once: a row that does not exist repeats the last one, which
  // changes no largest magnitude.
  Eight<kInput> x[4][kVectors];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint8_t* row = source + min(first_row + i, args.num_rows - 1) * args.w_row_pitch;
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
  if (threadIdx.x == 0) args.scale_inv[blockIdx.x] = scale.scale_inv;

  const int64_t part = static_cast<int64_t>(tile.matrix) * args.num_parts.value + tile.part;
  uint8_t* data = args.data + (part * args.num_rows + first_row) * args.k + tile.first_column;
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
    int* target = memory + column * (kTile / 4) + (line / 4 ^ lane) * 4 + line % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t of_columns[4];
      transpose_4x4(codes[half], of_columns);
#pragma unroll
      for (int i = 0; i < 4; ++i) target[(half * 4 + i) * (kTile / 4)] = of_columns[i];
    }
  }
  __syncthreads();
  uint8_t* transposed = args.transposed + tile.matrix * args.transposed_matrix_pitch +
                        static_cast<int64_t>(tile.part) * args.width;
  store_transposed<kVectorized>(memory, transposed, args.transposed_row_pitch, args.k, args.width, tile,
                                [](uint32_t column) { return column / 8 % kLanes; });
}
