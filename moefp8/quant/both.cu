// Quantize weights to E4M3 in blocks of 128x128 on Hopper, and write the codes twice: as they lie, and transposed.
//
// w is matrices of parts of rows; a part is gate or up, say, and its blocks begin at its first row. Each weight is read
// once, waits in registers until its block's scale is known, and leaves as two bytes.
#include "both.cuh"

struct Arguments {
  const uint8_t* w;                                   // [matrices, parts, num_rows, k]
  uint8_t* data;                                      // the same, without gaps
  float* scale_inv;                                   // [matrices, parts, row tiles, k tiles], without gaps
  uint8_t* transposed;                                // [matrices, k, parts, width]
  int64_t w_matrix_pitch, w_part_pitch, w_row_pitch;  // in bytes, as those of `transposed`
  int64_t transposed_matrix_pitch, transposed_row_pitch;
  uint32_t num_rows, k, width;  // of a part; columns of `transposed` from num_rows to width become zeros
  Divisor num_k_tiles, num_row_tiles, num_parts;  // how many a row has, a part, and a matrix

  __device__ const uint8_t* first_weight(const Tile& tile) const {
    return w + tile.matrix * w_matrix_pitch + tile.part * w_part_pitch;
  }
  template <Input kInput>
  __device__ int64_t row_pitch() const {
    return w_row_pitch;
  }
  __device__ uint8_t* first_code(const Tile& tile) const {
    const int64_t part = static_cast<int64_t>(tile.matrix) * num_parts.value + tile.part;
    return data + part * num_rows * k;
  }
  __device__ float* scale(const Tile&) const { return scale_inv + blockIdx.x; }
  __device__ uint8_t* first_transposed(const Tile& tile) const {
    return transposed + tile.matrix * transposed_matrix_pitch + static_cast<int64_t>(tile.part) * width;
  }
};

// scale_inv[m, p, i, j], data[m, p] and transposed[m, :, p] of w[m, p], as `quantize_block` makes them.
// Grid: one CTA of 256 threads owns one block; neighbouring CTAs the next one along K.
// Shared memory, barriers, alignment: those of `quantize_block`, with W^T.
template <Input kInput, bool kVectorized>
__global__ void __launch_bounds__(kThreads) both_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(16) int memory[];
  const Tile tile(args.num_k_tiles, args.num_row_tiles, args.num_parts, blockIdx.x);

  // The next kernel may be a GEMM that reads its weights before it waits for its predecessor. These may be what is
  // written here, so nothing lets it start early.
  wait_for_previous_kernel();
  quantize_block<kInput, kVectorized, true>(args, tile, memory);
}
