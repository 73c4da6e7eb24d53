// Level 1: block-scaled FP8 with plain FMAs. Tiles pass through shared memory, as in any first lesson on GEMMs.
#include "input.cuh"
#include "matrix.cuh"

constexpr int kBlock = 128;  // values of K that have one scale of a; of K and of N, one scale of b
constexpr int kTile = 128;   // rows and columns of d that a CTA computes
constexpr int kStep = 32;    // values of K that are in shared memory at a time
constexpr int kThreads = 256;

struct Arguments {
  const uint8_t* a;       // e4m3 [M, K]
  const float* a_scales;  // [K/128, a_scale_pitch], of which M are scales
  const uint8_t* b;       // e4m3 [N, K]
  const float* b_scales;  // [N/128, K/128]
  uint16_t* d;            // bf16 [M, N]
  int64_t a_scale_pitch;
  int m, n, num_k_blocks;
  int col_tiles;
};

// Brings kStep columns of 128 rows of x [num_rows, k] into `target`, as FP32 numbers, with the rows innermost. In place
// of rows after the last one comes the last one: what is made of them is not stored.
__device__ inline void load(float (&target)[kStep][kTile], const uint8_t* x, int num_rows, int64_t k, int first_row,
                            int64_t first_k) {
  const int row = threadIdx.x % kTile, column = threadIdx.x / kTile * 16;  // each thread brings 16 codes
  const int64_t source = min(first_row + row, num_rows - 1) * k + first_k + column;
  const uint4 codes = *reinterpret_cast<const uint4*>(x + source);
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < 16; ++i) target[column + i][row] = decode_e4m3(words[i / 4], i % 4);
}

// The i-th of the eight rows, or columns, of a thread: four neighbours, and their likes 64 further on. With eight
// neighbours, threads of a warp would meet in a bank of shared memory.
__device__ inline int place(int thread, int i) { return i / 4 * 64 + 4 * thread + i % 4; }

__device__ inline void read(float (&values)[8], const float (&row)[kTile], int thread) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(row + place(thread, i));
    values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
  }
}

// Formula   d = sum over k-blocks of (a_scale * b_scale) * (a b^T), each k-block summed by FMAs.
// Grid      a CTA of 256 threads for each tile of 128 x 128; a thread has 8 x 8 of it.
// Shared    32 columns of K of both operands, in FP32: 32 KB.
// Barriers  __syncthreads, before and after a step of K is loaded.
// Alignment a, b: 16 B and K a multiple of 128; d: 8 B and N a multiple of 4.
__global__ void __launch_bounds__(kThreads) plain(const __grid_constant__ Arguments args) {
  __shared__ __align__(16) float a[kStep][kTile], b[kStep][kTile];
  const int first_row = blockIdx.x / args.col_tiles * kTile, first_col = blockIdx.x % args.col_tiles * kTile;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  const int64_t k = int64_t(args.num_k_blocks) * kBlock;
  const float* b_scales = args.b_scales + int64_t(first_col / kBlock) * args.num_k_blocks;

  float total[8][8] = {};
  for (int k_block = 0; k_block < args.num_k_blocks; ++k_block) {
    // The first level of the sum: products of codes.
    float product[8][8] = {};
    for (int step = 0; step < kBlock; step += kStep) {
      __syncthreads();  // all have read the step before
      load(a, args.a, args.m, k, first_row, int64_t(k_block) * kBlock + step);
      load(b, args.b, args.n, k, first_col, int64_t(k_block) * kBlock + step);
      __syncthreads();
#pragma unroll 4
      for (int i = 0; i < kStep; ++i) {
        float rows[8], cols[8];
        read(rows, a[i], y), read(cols, b[i], x);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
#pragma unroll
          for (int c = 0; c < 8; ++c) product[r][c] = fmaf(rows[r], cols[c], product[r][c]);
        }
      }
    }
    // The second level: promotion. A k-block has a scale for each row of a, and one for this tile's columns of b.
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int row = min(first_row + place(y, r), args.m - 1);
      const float scale = args.a_scales[k_block * args.a_scale_pitch + row] * b_scales[k_block];
#pragma unroll
      for (int c = 0; c < 8; ++c) total[r][c] = fmaf(scale, product[r][c], total[r][c]);
    }
  }

#pragma unroll
  for (int r = 0; r < 8; ++r) {
#pragma unroll
    for (int c = 0; c < 8; c += 4) {
      const int row = first_row + place(y, r), col = first_col + place(x, c);
      const uint2 four = {pack_bf16(total[r][c], total[r][c + 1]), pack_bf16(total[r][c + 2], total[r][c + 3])};
      if (row < args.m && col < args.n) *reinterpret_cast<uint2*>(args.d + int64_t(row) * args.n + col) = four;
    }
  }
}
