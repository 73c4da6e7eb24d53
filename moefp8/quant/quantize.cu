// Quantize to E4M3 on Hopper, with one FP32 scale for each 1x128 or 128x128 block.
//
// x is matrices of rows of K elements. A thread holds vectors of eight neighbouring elements: it reads 16 B (32 B of
// FP32) and writes 8 B of codes. Each element is read once, and waits in registers until its block's scale is known.
#include "divisor.cuh"
#include "fp8.cuh"

constexpr int kBlock = 128;

struct Arguments {
  const uint8_t* x;
  uint8_t* data;                    // [matrices, rows, K]
  float* scale_inv;                 // 1x128: [matrices, K/128, pitch], rows innermost
                                    // 128x128: [matrices, rows/128, K/128]
  int64_t matrix_bytes, row_bytes;  // the pitches of matrices and of rows in x
  int64_t k, pitch;
  uint32_t num_matrices, num_rows;
  Divisor num_k_blocks, num_row_tiles;  // how many a row has, and a matrix
  uint32_t ue8m0;                       // whether scales are rounded up to powers of two
  float min_amax;                       // a block's largest magnitude counts as at least this
};

// Some rows of one column of blocks. Tiles are counted along K, then along the rows, then over the matrices; there are
// none past the last matrix.
struct Tile {
  uint32_t matrix, row_tile, k_block;

  __device__ Tile(const Arguments& args, uint32_t index) {
    const uint32_t row_tiles = args.num_k_blocks.quotient(index);
    k_block = index - row_tiles * args.num_k_blocks.value;
    matrix = args.num_row_tiles.quotient(row_tiles);
    row_tile = row_tiles - matrix * args.num_row_tiles.value;
  }
};

// The elements of one thread in a tile: kVectors vectors in each of kRows rows that lie kRowStep apart. kLanes
// neighbouring threads share a row, and their j-th vectors lie side by side.
template <Input kInput, int kRows, int kRowStep, int kLanes, bool kVectorized>
struct Part {
  static constexpr int kVectors = kBlock / 8 / kLanes;

  Eight<kInput> x[kRows][kVectors];
  uint32_t width;     // columns of the block: 128, or less at the end of the rows
  uint32_t num_rows;  // how many of kRows exist

  // No load has a condition, so that all are in flight at once: a row that does not exist repeats the
  // last one, which changes no largest magnitude.
  __device__ Part(const Arguments& args, const Tile& tile, uint32_t first_row) {
    const int64_t first_column = static_cast<int64_t>(tile.k_block) * kBlock;
    width = min(args.k - first_column, static_cast<int64_t>(kBlock));
    const bool inside = tile.matrix < args.num_matrices && first_row < args.num_rows;
    num_rows = inside ? (args.num_rows - first_row + kRowStep - 1) / kRowStep : 0;
    const uint8_t* source = args.x + min(tile.matrix, args.num_matrices - 1) * args.matrix_bytes +
                            first_column * Eight<kInput>::kElementBytes;
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
      const uint8_t* row = source + min(first_row + i * kRowStep, args.num_rows - 1) * args.row_bytes;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) x[i][j].template load<kVectorized>(row, column(j), width);
    }
  }

  __device__ uint32_t largest(int i) const {
    uint32_t word = x[i][0].largest();
#pragma unroll
    for (int j = 1; j < kVectors; ++j) word = Eight<kInput>::larger(word, x[i][j].largest());
    return word;
  }

  // Where `data` has the first element of this thread's first row of the block.
  __device__ static uint8_t* target(const Arguments& args, const Tile& tile, uint32_t first_row) {
    const int64_t row = static_cast<int64_t>(tile.matrix) * args.num_rows + first_row;
    return args.data + row * args.k + static_cast<int64_t>(tile.k_block) * kBlock;
  }

  __device__ void store(uint8_t* target, int64_t k, uint32_t i, const Scale& scale) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (i < num_rows && column(j) < width) {
        Eight<kInput>::template store<kVectorized>(target + i * (k * kRowStep), column(j), width, x[i][j].e4m3(scale));
      }
    }
  }

 private:
  __device__ static uint32_t column(int j) { return threadIdx.x % kLanes * 8 + j * (kLanes * 8); }
};

// scale_inv[m, b] = max(amax |x[m, 128 b + 0..127]|, min_amax) / 448; data = x / scale_inv in E4M3.
// Grid: kLanes threads own kRows rows of one block column; neighbouring threads the next one along K.
// Shared memory: none.
// Barriers: none; kLanes lanes meet in shuffles.
// Alignment: vectorized if x and its strides are multiples of 16 B and K of 8 elements; else any.
template <Input kInput, int kRows, int kLanes, bool kVectorized>
__global__ void __launch_bounds__(256) quantize_1x128_kernel(const __grid_constant__ Arguments args) {
  const Tile tile(args, blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes);
  const uint32_t first_row = tile.row_tile * kRows, lane = threadIdx.x % kLanes;

  wait_for_previous_kernel();
  let_next_kernel_start();

  const Part<kInput, kRows, 1, kLanes, kVectorized> part(args, tile, first_row);
  uint32_t amax[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) amax[i] = Eight<kInput>::amax(part.largest(i));
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) amax[i] = max(amax[i], __shfl_xor_sync(0xffffffff, amax[i], distance));
  }
  uint8_t* target = part.target(args, tile, first_row);
  float scale_inv = 0;  // the scale of the lane-th row
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Scale scale(amax[i], args.ue8m0, args.min_amax);
    if (lane == i) scale_inv = scale.scale_inv;
    part.store(target, args.k, i, scale);
  }
  if (lane < kRows && lane < part.num_rows) {  // neighbours in memory: one store for all rows
    const int64_t column = static_cast<int64_t>(tile.matrix) * args.num_k_blocks.value + tile.k_block;
    args.scale_inv[column * args.pitch + first_row + lane] = scale_inv;
  }
}

// scale_inv[i, j] = max(amax |block i, j of x|, min_amax) / 448; data = x / scale_inv in E4M3.
// Grid: one CTA of 256 threads owns one block; neighbouring CTAs the next one along K.
// Shared memory: 32 B, the largest magnitude of each warp.
// Barriers: one, between these magnitudes and the scale.
// Alignment: vectorized if x and its strides are multiples of 16 B and K of 8 elements; else any.
template <Input kInput, bool kVectorized>
__global__ void __launch_bounds__(256) quantize_128x128_kernel(const __grid_constant__ Arguments args) {
  constexpr int kThreads = 256, kLanes = kBlock / 8, kRowStep = kThreads / kLanes, kRows = kBlock / kRowStep;
  __shared__ uint32_t warp_amax[kThreads / kWarp];
  const Tile tile(args, blockIdx.x);
  const uint32_t first_row = tile.row_tile * kBlock + threadIdx.x / kLanes;

  wait_for_previous_kernel();
  let_next_kernel_start();

  const Part<kInput, kRows, kRowStep, kLanes, kVectorized> part(args, tile, first_row);
  uint32_t largest = part.largest(0);
#pragma unroll
  for (int i = 1; i < kRows; ++i) largest = Eight<kInput>::larger(largest, part.largest(i));
  warp_amax[threadIdx.x / kWarp] = __reduce_max_sync(0xffffffff, Eight<kInput>::amax(largest));
  __syncthreads();
  const uint32_t amax = __reduce_max_sync(0xffffffff, warp_amax[threadIdx.x % (kThreads / kWarp)]);
  const Scale scale(amax, args.ue8m0, args.min_amax);
  uint8_t* target = part.target(args, tile, first_row);
#pragma unroll
  for (int i = 0; i < kRows; ++i) part.store(target, args.k, i, scale);
  if (threadIdx.x == 0) args.scale_inv[blockIdx.x] = scale.scale_inv;
}
