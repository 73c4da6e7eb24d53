// What levels 2 to 5 share: their arguments, and what a warpgroup does with a k-block and with its rows of a tile.
#pragma once
#include "matrix.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kBlock = 128;                  // values of K that have one scale of a; of K and of N, one scale of b
constexpr int kMaxSharedBytes = 227 * 1024;  // the most that a CTA can have; here each has an SM for itself

struct Arguments {
  const float* a_scales;  // [K/128, a_scale_pitch], of which M are scales
  const float* b_scales;  // [N/128, K/128]
  uint16_t* d;            // bf16 [M, N]
  int64_t a_scale_pitch;
  int m, n, num_k_blocks;
  int row_tiles, col_tiles;  // how many tiles d has; with clusters, a tile of a cluster has those of its CTAs
  int band;                  // row tiles that are walked together
};

// Which stage of the pipeline is next, and the parity of the phase that its barriers are in.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// What a thread has of its warpgroup's 64 rows: rows `row` and `row` + 8 and, of every eight columns, `col` and the
// next one. The comment at `wgmma` in wgmma.cuh says in which registers.
struct Place {
  int row = threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4;
  int col = threadIdx.x % 4 * 2;
};

// The scales of a k-block with which a thread promotes: of a for rows `row` and `row` + 8, and of b.
struct Scales {
  float a[2], b;
};

// Reads them from global memory, for 64 rows and at most 128 columns of d, which begin at multiples of these.
struct ScaleReader {
  const float *a[2], *b;
  int64_t a_pitch;

  // In place of scales after the last row or column come the last ones: what is made of them is not stored.
  __device__ ScaleReader(const Arguments& args, int first_row, int first_col)
      : b(args.b_scales + int64_t(min(first_col, args.n - 1) / kBlock) * args.num_k_blocks),
        a_pitch(args.a_scale_pitch) {
    const int row = first_row + Place().row;
    a[0] = args.a_scales + min(row, args.m - 1), a[1] = args.a_scales + min(row + 8, args.m - 1);
  }
  __device__ Scales read(int k_block) const {
    return {{a[0][k_block * a_pitch], a[1][k_block * a_pitch]}, b[k_block]};
  }
};

// Begins product = a b^T for a k-block, a [64, 128] and b [kN, 128] in shared memory. A WGMMA takes 32 of K, so there
// are four. Until `finish_product` has waited, `product` belongs to the tensor cores.
template <int kN>
__device__ inline void begin_product(float (&product)[kN / 2], uint32_t a_descriptor, uint32_t b_descriptor) {
  pin_registers(product);
  wgmma_fence();
#pragma unroll
  for (uint32_t i = 0; i < kBlock / 32; ++i) {
    const uint64_t a = wgmma_descriptor(a_descriptor + i * kDescriptorStepK);
    const uint64_t b = wgmma_descriptor(b_descriptor + i * kDescriptorStepK);
    wgmma<kN>(product, a, b, i > 0);
  }
  wgmma_commit();
}

// Waits until all products that were begun are there.
template <int kSize>
__device__ inline void finish_product(float (&product)[kSize]) {
  wgmma_wait<0>();
  pin_registers(product);
}

// The second level of the sum: total += product * (a_scale * b_scale). a_scale: of rows `row` and `row` + 8.
template <int kSize>
__device__ inline void promote(float (&total)[kSize], const float (&product)[kSize], const float (&a_scale)[2],
                               float b_scale) {
  const float scale[2] = {a_scale[0] * b_scale, a_scale[1] * b_scale};
#pragma unroll
  for (int i = 0; i < kSize; ++i) total[i] = fmaf(scale[i / 2 % 2], product[i], total[i]);
}

// Stores a warpgroup's 64 rows of a tile, two numbers at a time.
template <int kSize>
__device__ inline void store_rows(const float (&total)[kSize], const Arguments& args, int first_row, int first_col) {
  const Place place;
#pragma unroll
  for (int i = 0; i < kSize; i += 2) {
    const int row = first_row + place.row + i / 2 % 2 * 8, col = first_col + place.col + i / 4 * 8;
    auto* target = reinterpret_cast<uint32_t*>(args.d + int64_t(row) * args.n + col);
    if (row < args.m && col < args.n) *target = pack_bf16(total[i], total[i + 1]);
  }
}
