// Quantize weights that lie anywhere to E4M3 in blocks of 128x128 on Hopper, into a stack that holds them all.
//
// Matrices of one shape, each at an address of its own, such as the experts that a trainer sends one by one. The
// addresses come in the kernel's arguments: no table has to reach the GPU before it. A launch may write some matrices
// of the stack and leave the others as they are.
#include "both.cuh"

constexpr int kMaxMatrices = 256;
constexpr int kPlacesPerWord = 4;
constexpr int kPlaceWords = 64;  // words that tell the places of all
static_assert(kPlaceWords * kPlacesPerWord == kMaxMatrices);

struct Arguments {
  uint8_t* data;        // [stack, num_rows, k]
  float* scale_inv;     // [stack, row tiles, k tiles]
  uint8_t* transposed;  // [stack / num_parts, k, num_parts, width]; not read without kTransposed
  const uint8_t* w[kMaxMatrices];  // of each matrix [num_rows, k], without gaps
  uint64_t places[kPlaceWords];    // of each, 16 bits: which of the stack it becomes
  int64_t transposed_matrix_pitch, transposed_row_pitch;  // in bytes
  uint32_t num_rows, k, width;
  Divisor num_k_tiles, num_row_tiles, num_parts;  // how many a row has, a matrix, and W^T of a matrix of the stack

  // tile.matrix counts the matrices of the launch.
  __device__ uint32_t place(const Tile& tile) const {
    return places[tile.matrix / kPlacesPerWord] >> tile.matrix % kPlacesPerWord * 16 & 0xffff;
  }
  __device__ const uint8_t* first_weight(const Tile& tile) const { return w[tile.matrix]; }
  template <Input kInput>
  __device__ int64_t row_pitch() const {
    return static_cast<int64_t>(k) * Eight<kInput>::kElementBytes;
  }
  __device__ uint8_t* first_code(const Tile& tile) const {
    return data + static_cast<int64_t>(place(tile)) * num_rows * k;
  }
  __device__ float* scale(const Tile& tile) const {
    const int64_t num_tiles = num_row_tiles.value * num_k_tiles.value;
    return scale_inv + (static_cast<int64_t>(place(tile)) - tile.matrix) * num_tiles + blockIdx.x;
  }
  __device__ uint8_t* first_transposed(const Tile& tile) const {
    const uint32_t index = place(tile), matrix = num_parts.quotient(index);
    return transposed + matrix * transposed_matrix_pitch +
           static_cast<int64_t>(index - matrix * num_parts.value) * width;
  }
};

// scale_inv[m], data[m] and transposed[m / num_parts, :, m % num_parts] of w[i] for m = places[i], as `quantize_block`
// makes them.
// Grid: one CTA of 256 threads owns one block; neighbouring CTAs the next one along K.
// Shared memory, barriers, alignment: those of `quantize_block`.
template <Input kInput, bool kVectorized, bool kTransposed>
__global__ void __launch_bounds__(kThreads) each_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(16) int memory[];
  const Tile tile(args.num_k_tiles, args.num_row_tiles, {1, 1, 0}, blockIdx.x);

  // What is written are weights, as in both.cu, so nothing lets the next kernel start early.
  wait_for_previous_kernel();
  quantize_block<kInput, kVectorized, kTransposed>(args, tile, memory);
}
