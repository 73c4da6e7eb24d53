// The gradient of the activation for experts with trained weights: row codes for the GEMM that computes the gradient of x,
// column codes for the GEMMs that compute gradients of weights, which sum over tokens. Three kernels, in order:
//
// 1. activation_columns_weights_kernel computes the weight of each row.
// 2. activation_columns_kernel makes codes from the gradient of `a` = f(gate) * up, and from the saved gate and up.
// 3. activation_columns_sums_kernel adds up the gradients of weights.
//
// A scale of row codes is for 128 columns, a scale of column codes for 128 rows, or for 128x128 of weighted `a` with
// kBlocks. So a CTA owns a tile of 128x128. It computes all values twice: FP32 values of the three results would take
// 192 KB a tile, their inputs take 96 KB in BF16, which two CTAs of an SM keep in shared memory. The first pass finds
// the largest magnitudes and stores row codes, the second stores column codes. Each has its own file, and so has the
// tile that both read.
#include "input.cuh"
#include "activation_columns_first_pass.cuh"
#include "activation_columns_second_pass.cuh"
#include "activation_columns_tile.cuh"

// ---- Weights of rows ----

// The choices of a token.
template <Input kWeights>
struct Choices {
  const int* rows;
  const uint8_t* weights;
  int64_t pitch;  // of weights, in bytes
  uint32_t count;

  // The sum of the weights of all choices of `row` whose number is `lane` modulo kStride, in the order of a warp: lane i
  // adds choices i, i + 32, ..., then lanes whose numbers differ in one bit add their sums, the highest bit first.
  template <uint32_t kStride = 1>
  __device__ float sum_of(int row, uint32_t lane = 0) const {
    float sum = 0;
    if (lane >= count) return sum;
    if constexpr (kStride < kWarp) {
      sum = __fadd_rn(sum_of<2 * kStride>(row, lane), sum_of<2 * kStride>(row, lane + kStride));
    } else {
      for (uint32_t i = lane; i < count; i += kWarp) {
        if (rows[i] == row) sum = __fadd_rn(sum, load_float<kWeights>(weights + i * pitch));
      }
    }
    return sum;
  }

  __device__ bool is_first(int row, uint32_t choice) const {
    for (uint32_t i = 0; i < choice; ++i) {
      if (rows[i] == row) return false;
    }
    return true;
  }
};

// weight_of_row[r] = the sum of the weights of all choices of r, in the order in which activation_backward.cu adds them;
// row_to_token[r] = their token.
// Grid: a thread owns a choice. No shared memory, no barriers, no alignment.
template <Input kWeights>
__global__ void __launch_bounds__(kThreads) activation_columns_weights_kernel(const __grid_constant__ Arguments args) {
  const uint32_t choice = blockIdx.x * kThreads + threadIdx.x, top_k = args.top_k.value;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (choice >= args.num_choices) return;
  const uint32_t token = args.top_k.quotient(choice), mine = choice - token * top_k;
  const Choices<kWeights> choices = {args.token_to_row + static_cast<int64_t>(token) * top_k,
                                     args.weights + token * args.weight_token_bytes, args.weight_choice_bytes, top_k};
  const int row = choices.rows[mine];
  const bool is_first = static_cast<uint32_t>(row) < args.num_rows && choices.is_first(row, mine);
  args.is_first[choice] = is_first;
  if (!is_first) return;
  const float sum = choices.sum_of(row);
  args.weight_of_row[row] = sum == 0 ? -0.f : sum;
  if (args.row_to_token != nullptr) args.row_to_token[row] = token;
}

// ---- Gradients ----

template <Activation kKind, bool kIsLimited, bool kIsFp8, bool kBlocks>
__device__ void both_passes(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory) {
  float of_columns[kResults][kColumns] = {};
  first_pass<kKind, kIsLimited, kIsFp8, kBlocks>(args, tile, memory, of_columns);
  store_products(args, tile, memory);
  find_scales<kIsFp8, kBlocks>(args, tile, memory, of_columns);
  const ColumnTargets targets(args, tile);
  if (targets.first_row >= (tile.rows.num_rows + 31) / 32 * 32) return;
#pragma unroll 1
  for (uint32_t unit = 0; unit < kUnits; ++unit)
    store_columns<kKind, kIsLimited, kIsFp8, kBlocks>(args, tile, memory, targets, unit);
}

// rows = quantize_1x128(d), columns = quantize_128x1(d) and quantize_128x1(w * a), where d = w * grad * d a / d [gate |
// up]. partial_sums = <grad, a> of the tile's columns.
// kBlocks: activated_scales[b, j] is the scale of w * a for all rows of block b and the 128 columns of tile j.
// Grid: a CTA of 256 threads owns 128 rows of one expert and 128 columns of I; neighbouring CTAs the next columns.
// Shared memory: `Memory`.
// Barriers: one after the weights of rows, two around sums and two around scales of columns; sixteen lanes exchange
// values in shuffles. In the first pass each thread reads only its own copies, so it needs no barrier.
// Alignment: rows of grad and of BF16 tensors begin at multiples of 16 B, those of `rows` at 8 B, column codes at 16 B;
// codes of gate and up at 8 B, or anywhere if 8 does not divide I. All may end anywhere.
template <Activation kKind, bool kIsFp8, bool kBlocks>
__global__ void __launch_bounds__(kThreads, 2) activation_columns_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(16) int memory[];
  Memory<kIsFp8>& shared = *reinterpret_cast<Memory<kIsFp8>*>(memory);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Tile tile(args);
  if (tile.rows.num_rows == 0) return;
  copy_tile(args, tile, shared);
  copy_factors(args, tile, shared);
  __syncthreads();
  if (args.activation.limit < __uint_as_float(kInfinity)) {
    both_passes<kKind, true, kIsFp8, kBlocks>(args, tile, shared);
  } else {
    both_passes<kKind, false, kIsFp8, kBlocks>(args, tile, shared);
  }
}

// ---- Gradients of weights ----

// of_weights[t, j] = the sum of the partial sums of the choice's row, in the order of the tiles; 0 without a row.
// Grid: a thread owns a choice, with kAtOnce loads in flight. No shared memory, no barriers, no alignment.
template <int kAtOnce>
__global__ void __launch_bounds__(kThreads) activation_columns_sums_kernel(const __grid_constant__ Arguments args) {
  const uint32_t choice = blockIdx.x * kThreads + threadIdx.x;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (choice >= args.num_choices) return;
  const uint32_t row = args.token_to_row[choice];
  float sum = 0;
  if (row < args.num_rows) {
    const float* partial = args.partial_sums + row;
#pragma unroll kAtOnce
    for (uint32_t i = 0; i < args.num_tiles.value; ++i) sum += partial[static_cast<int64_t>(i) * args.num_rows];
  }
  args.of_weights[choice] = sum;
}
