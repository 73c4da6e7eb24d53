// The gradient of SwiGLU for experts whose weights have gradients, too: codes of rows for the GEMM that gives the
// gradient of what came in, codes of columns for those that sum over tokens. Three kernels in a row.
//
// 1. swiglu_columns_weights_kernel finds the weight of each row.
// 2. swiglu_columns_kernel reads the gradient of `a` = silu(gate) * up, and gate and up as the forward has saved them.
// 3. swiglu_columns_sums_kernel adds up the gradients of weights.
//
// A scale of rows is of 128 columns, and one of columns of 128 rows; codes of columns of weighted `a` may share one for
// 128 columns, too (kBlocks). So a CTA owns a tile of 128x128, and computes all values twice: FP32 values of three
// results are 192 KB of a tile, and what they come from is 96 KB in BF16, which two CTAs of an SM keep in shared
// memory. The first pass finds the largest magnitudes and stores codes of rows, the second stores codes of columns.
#include "column_block.cuh"
#include "copy_async.cuh"
#include "divisor.cuh"
#include "fp8.cuh"
#include "input.cuh"
#include "swiglu_gradient.cuh"

constexpr int kTile = ColumnBlock::kRows;   // rows and columns
constexpr int kThreads = 256;
constexpr int kColumns = 8;                 // of a thread, side by side, in the first pass
constexpr int kLanes = kTile / kColumns;    // threads that share a row then
constexpr int kRowStep = 4 * kThreads / kWarp;  // rows that the first pass takes at once, four a warp
constexpr int kSteps = kTile / kRowStep;
constexpr int kUnitRows = 16;               // of a thread in the second pass, with two columns
constexpr int kUnits = kTile / kUnitRows * kTile / 2 / kThreads;
constexpr int kResults = 3;                 // gradients of gate and of up, and weighted `a`
template <bool kBlocks>
constexpr int kOfColumns = kBlocks ? 2 : kResults;  // results that have a scale for each column

struct Arguments {
  const uint8_t* grad;       // bf16 [R, I]: the gradient of `a`, times no weight
  int64_t grad_row_bytes;    // the pitch of its rows, a multiple of 16
  const uint8_t* saved;      // gate and up: bf16 [R, 2, I], or E4M3 [R, 2, I] without gaps
  int64_t saved_row_bytes;   // the pitch of rows of I
  const float* saved_scales; // [I/128, pitch], where row r has 2 r for gate and 2 r + 1 for up
  int64_t saved_scale_pitch;
  const int* expert_offsets; // [E + 1]
  const int* token_to_row;   // [T, k]; a choice has no row where it is none of [0, R)
  const uint8_t* weights;    // [T, k]
  int64_t weight_token_bytes, weight_choice_bytes;
  uint8_t* rows;             // E4M3 [R, 2, padded I]: gradients of gate and of up
  int64_t row_pitch;         // of [2, padded I]
  float* row_scales;         // [2 * padded I / 128, pitch], rows innermost
  int64_t scale_pitch;
  uint8_t* gate_up_columns;  // E4M3 [B, 2 I, 128]
  float* gate_up_scales;     // [B, pitch]
  int64_t gate_up_scale_pitch;
  uint8_t* activated_columns;  // E4M3 [B, I, 128]
  float* activated_scales;     // [B, pitch]; of each row I are written, or I / 128 if kBlocks
  int64_t activated_scale_pitch;
  float* weight_of_row;      // [R]; 0 at first where there is no choice. Behind the first kernel a weight of 0 is -0
  int* row_to_token;         // [R], for who gathers tokens behind the first kernel; null: nobody does
  float* partial_sums;       // [I/128, R]: <grad, a> of 128 columns
  float* of_weights;         // [T, k]
  float* is_first;           // [T, k]: 1 for the first choice of a row, 0 for others
  uint32_t num_choices, num_rows, num_experts, size;
  Divisor top_k, num_tiles;  // choices of a token, tiles of I
  float limit;               // bounds gate from above and up on both sides; may be infinite
  float min_amax;
};

// ---- Weights of rows ----

// What a choice is looked up in: the choices of its token.
template <Input kWeights>
struct Choices {
  const int* rows;
  const uint8_t* weights;
  int64_t pitch;  // of weights, in bytes
  uint32_t count;

  // The sum of the weights of all choices of `row` whose number is `lane` modulo kStride: as a warp adds them, of which
  // lane i has choices i, i + 32, ..., and then lanes meet whose numbers differ in one bit, the highest bit first.
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

// weight_of_row[r] = the sum of the weights of all choices of r, in the order in which swiglu_backward.cu adds them;
// row_to_token[r] = the token that has them.
// Grid: a thread owns a choice. No shared memory, no barriers, no alignment.
template <Input kWeights>
__global__ void __launch_bounds__(kThreads) swiglu_columns_weights_kernel(const __grid_constant__ Arguments args) {
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

// 128 rows of a tile in shared memory. Of each column's sixteenth rows, none shares a bank with others: behind sixteen
// rows 16 B are left out.
template <int kElementBytes>
struct Rows {
  static constexpr int kRowBytes = kTile * kElementBytes, kUnitBytes = kUnitRows * kRowBytes + 16;
  alignas(16) uint8_t bytes[kTile / kUnitRows * kUnitBytes];

  __device__ uint8_t* at(uint32_t row, uint32_t column) {
    return bytes + row / kUnitRows * kUnitBytes + row % kUnitRows * kRowBytes + column * kElementBytes;
  }
  // Bytes to the same columns `step` steps of the first pass and i < kUnitRows rows of the same sixteen further on.
  __device__ static constexpr uint32_t distance(uint32_t step, uint32_t i) {
    return step * (kRowStep / kUnitRows) * kUnitBytes + i * kRowBytes;
  }
};

// What a CTA keeps of its tile: 112 KB, or 81 KB if gate and up are E4M3.
template <bool kIsFp8>
struct Memory {
  static constexpr int kSavedBytes = kIsFp8 ? 1 : 2;
  Rows<2> grad;
  Rows<kSavedBytes> saved[2];  // gate, up
  union {
    alignas(16) float amax[kThreads / kWarp][kResults][kTile];  // of columns, as each warp found them
    alignas(16) float products[kTile][kLanes + 4];  // <grad, a>, as each thread found them; no bank is met twice
  };
  alignas(16) Divider dividers[kResults][kTile];
  alignas(16) float weights[kTile];  // 0 where no choice has the row
  alignas(16) float scales[2][kIsFp8 ? kTile : 1];
};

// Where a CTA works.
struct Tile {
  uint32_t block, index, first_column;
  ColumnBlock rows;

  __device__ Tile(const Arguments& args)
      : block(args.num_tiles.quotient(blockIdx.x)),
        index(blockIdx.x - block * args.num_tiles.value),
        first_column(index * kTile),
        rows(args.expert_offsets, args.num_experts, args.num_rows, block) {}
};

// The first of a thread's rows in the first pass, which has two in each step; kRowStep are between steps.
__device__ inline uint32_t first_row() { return threadIdx.x / kWarp * 4 + threadIdx.x / kLanes % 2 * 2; }

// Copies codes of gate or of up that are not at multiples of 8 B.
__device__ inline void copy_bytes(uint8_t* target, const uint8_t* source, uint32_t num_bytes) {
  uint32_t codes[2] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i < num_bytes) codes[i / 4] |= uint32_t(source[i]) << i % 4 * 8;
  }
  *reinterpret_cast<uint2*>(target) = {codes[0], codes[1]};
}

// Starts to copy what the thread reads in the first pass, a group for each step.
template <bool kIsFp8>
__device__ void copy_tile(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory) {
  const uint32_t in_tile = threadIdx.x % kLanes * kColumns, column = tile.first_column + in_tile;
  const uint32_t row = tile.rows.first_row + first_row();
  const uint8_t* grad = args.grad + row * args.grad_row_bytes + column * 2;
  const uint8_t* saved = args.saved + row * 2 * args.saved_row_bytes + column * memory.kSavedBytes;
  uint8_t* grad_target = memory.grad.at(first_row(), in_tile);
  uint8_t* saved_target = memory.saved[0].at(first_row(), in_tile);
  const uint32_t num_rows = column < args.size ? tile.rows.num_rows : 0;
  const bool is_bytewise = kIsFp8 && args.size % kColumns != 0;
#pragma unroll
  for (uint32_t step = 0; step < kSteps; ++step) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const bool exists = first_row() + step * kRowStep + i < num_rows;
      copy_async<16>(grad_target + memory.grad.distance(step, i), grad, exists);
      grad += (i == 0 ? 1 : kRowStep - 1) * args.grad_row_bytes;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint8_t* source = saved;
        uint8_t* target = saved_target + memory.saved[0].distance(step, i) + half * sizeof(memory.saved[0]);
        saved += (i == 0 || half == 0 ? 1 : 2 * kRowStep - 3) * args.saved_row_bytes;
        if constexpr (!kIsFp8) {
          copy_async<16>(target, source, exists);
        } else if (!is_bytewise) {
          copy_async<8>(target, source, exists);
        } else {
          copy_bytes(target, source, exists ? args.size - column : 0);
        }
      }
    }
    end_copy_group();
  }
}

// The weights of rows, and the scales of gate and up.
template <bool kIsFp8>
__device__ void copy_factors(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory) {
  if constexpr (kIsFp8) {
    const uint32_t row = threadIdx.x / 2, of_all = tile.rows.first_row + row;
    float scale = 0;
    if (row < tile.rows.num_rows && __float_as_uint(args.weight_of_row[of_all]) != 0) {
      const int64_t of_saved = 2 * static_cast<int64_t>(of_all) + threadIdx.x % 2;
      scale = args.saved_scales[tile.index * args.saved_scale_pitch + of_saved];
    }
    memory.scales[threadIdx.x % 2][row] = scale;
  }
  const uint32_t row = threadIdx.x;
  if (row >= kTile) return;
  memory.weights[row] = row < tile.rows.num_rows ? args.weight_of_row[tile.rows.first_row + row] : 0;
}

// Neighbouring elements of a row of the tile, as they lie in shared memory.
template <bool kIsFp8, int kCount>
struct Part {
  static constexpr int kBytes = kCount * (kIsFp8 ? 1 : 2);
  uint32_t grad[kCount / 2], saved[2][kBytes >= 4 ? kBytes / 4 : 1];

  // of_grad, of_gate: where they lie.
  __device__ void load(const uint8_t* of_grad, const uint8_t* of_gate) {
    load_words<kCount * 2>(grad, of_grad);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      load_words<kBytes>(saved[half], of_gate + half * sizeof(Memory<kIsFp8>::saved[0]));
  }

  __device__ static float bf16(const uint32_t* words, int i) {
    return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
  }
  __device__ float grad_at(int i) const { return bf16(grad, i); }
  __device__ float saved_at(int half, int i, float scale) const {
    if constexpr (kIsFp8) return __fmul_rn(decode_e4m3(saved[half][i / 4], i % 4), scale);
    return bf16(saved[half], i);
  }

 private:
  template <int kNumBytes>
  __device__ static void load_words(uint32_t* words, const uint8_t* source) {
    if constexpr (kNumBytes == 16) {
      const uint4 four = *reinterpret_cast<const uint4*>(source);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if constexpr (kNumBytes == 8) {
      const uint2 two = *reinterpret_cast<const uint2*>(source);
      words[0] = two.x, words[1] = two.y;
    } else if constexpr (kNumBytes == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(source);
    } else {
      words[0] = *reinterpret_cast<const uint16_t*>(source);
    }
  }
};

// The larger of a magnitude and that of x; NaN is the largest.
__device__ inline float larger_magnitude(float amax, float x) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(amax), "f"(fabsf(x)));
  return larger;
}

// Of two values, keeps that of lanes like this one and gives the other to the lane at `distance`, which has kept it.
template <class Combine>
__device__ float keep_half(float first, float second, uint32_t distance, Combine combine) {
  const bool is_second = threadIdx.x & distance;
  const float kept = is_second ? second : first;
  return combine(kept, __shfl_xor_sync(0xffffffff, is_second ? first : second, distance));
}

// Where a thread stores codes of rows, in each step of the first pass.
struct RowTargets {
  uint8_t* codes;  // of its first row's gate
  float* scale;    // of the row and the half whose scale it makes
  uint32_t num_rows;

  __device__ RowTargets(const Arguments& args, const Tile& tile) : num_rows(tile.rows.num_rows) {
    const int64_t row = tile.rows.first_row + first_row(), own_row = row + threadIdx.x / 8 % 2;
    const uint32_t half = threadIdx.x / 4 % 2;
    codes = args.rows + row * args.row_pitch + tile.first_column + threadIdx.x % kLanes * kColumns;
    scale = args.row_scales + (half * args.num_tiles.value + tile.index) * args.scale_pitch + own_row;
  }

  // Quantizes two rows of gate's and of up's gradients, and goes on to the next step's. Sixteen lanes have a pair of
  // rows: four of them make one of its four scales, and tell all.
  __device__ void store(const Arguments& args, uint32_t row, const float (&values)[2][2][kColumns],
                        const float (&amax)[2][2]) {
    const auto larger = [](float x, float y) {
      return __uint_as_float(max(__float_as_uint(x), __float_as_uint(y)));
    };
    const float of_gate = keep_half(amax[0][0], amax[1][0], 8, larger);
    const float of_up = keep_half(amax[0][1], amax[1][1], 8, larger);
    float mine = keep_half(of_gate, of_up, 4, larger);
#pragma unroll
    for (uint32_t distance = 2; distance > 0; distance /= 2)
      mine = larger(mine, __shfl_xor_sync(0xffffffff, mine, distance));
    const Scale made(__float_as_uint(mine), false, args.min_amax);
    if (threadIdx.x % 4 == 0 && row + threadIdx.x / 8 % 2 < num_rows) *scale = made.scale_inv;
    scale += kRowStep;
    uint8_t* target = codes;
    codes += kRowStep * args.row_pitch;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const int source = (threadIdx.x & kLanes) + i * 8 + half * 4;
        const Divider divider = {__uint_as_float(__shfl_sync(0xffffffff, __float_as_uint(made.divisor), source)),
                                 __uint_as_float(__shfl_sync(0xffffffff, __float_as_uint(made.reciprocal), source))};
        const float* x = values[i][half];
        const auto four = [&](int j) {
          return encode_e4m3(divider.divide(x[j]), divider.divide(x[j + 1]), divider.divide(x[j + 2]),
                             divider.divide(x[j + 3]));
        };
        const uint2 both = {four(0), four(4)};
        if (row + i < num_rows) *reinterpret_cast<uint2*>(target + half * args.num_tiles.value * kTile) = both;
      }
      target += args.row_pitch;
    }
  }
};

// Makes zeros of what the thread has copied of a row from `count` columns on.
template <bool kIsFp8>
__device__ void clear(uint8_t* grad, uint8_t* gate, uint32_t count) {
#pragma unroll 1
  for (uint32_t i = count; i < kColumns; ++i) {
    reinterpret_cast<uint16_t*>(grad)[i] = 0;
    for (uint32_t half = 0; half < 2; ++half) {
      uint8_t* target = gate + half * sizeof(Memory<kIsFp8>::saved[0]);
      if constexpr (kIsFp8) {
        target[i] = 0;
      } else {
        reinterpret_cast<uint16_t*>(target)[i] = 0;
      }
    }
  }
}

// Codes of rows, the largest magnitudes of columns as a thread finds them, and the sums of grad times `a`. If kBlocks,
// of_columns[2][0] is that of all columns of weighted `a`.
template <bool kIsLimited, bool kIsFp8, bool kBlocks>
__device__ void first_pass(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory,
                           float (&of_columns)[kResults][kColumns]) {
  const uint32_t column = threadIdx.x % kLanes * kColumns, of_all = tile.first_column + column;
  const uint32_t width = args.size - min(args.size, of_all);
  uint8_t *of_grad = memory.grad.at(first_row(), column), *of_gate = memory.saved[0].at(first_row(), column);
  RowTargets targets(args, tile);
#pragma unroll 2
  for (uint32_t row = first_row(); row / kRowStep * kRowStep < tile.rows.num_rows; row += kRowStep) {
    wait_for_copies<kSteps - 1>();
    float values[2][2][kColumns], amax[2][2];
    const uint2 weights = *reinterpret_cast<const uint2*>(&memory.weights[row]);
    // Whatever the memory of a row without a choice holds, or what lies behind the end of a row, it counts as zeros.
    if (weights.x == 0 || weights.y == 0 || width < kColumns) {
#pragma unroll 1
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t count = (i == 0 ? weights.x : weights.y) == 0 ? 0 : width;
        clear<kIsFp8>(of_grad + memory.grad.distance(0, i), of_gate + memory.saved[0].distance(0, i), count);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float weight = __fadd_rn(__uint_as_float(i == 0 ? weights.x : weights.y), 0);  // -0 becomes 0
      const uint32_t in_grad = memory.grad.distance(0, i), in_gate = memory.saved[0].distance(0, i);
      float scales[2] = {1, 1};
      if constexpr (kIsFp8) scales[0] = memory.scales[0][row + i], scales[1] = memory.scales[1][row + i];
      Part<kIsFp8, kColumns> part;
      part.load(of_grad + in_grad, of_gate + in_gate);
      float product = 0;
      amax[i][0] = amax[i][1] = 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float grad = part.grad_at(j);
        const SwigluGradient x = differentiate_swiglu<kIsLimited>(grad, weight, part.saved_at(0, j, scales[0]),
                                                                  part.saved_at(1, j, scales[1]), args.limit);
        values[i][0][j] = x.of_gate, values[i][1][j] = x.of_up;
        amax[i][0] = larger_magnitude(amax[i][0], x.of_gate), amax[i][1] = larger_magnitude(amax[i][1], x.of_up);
        of_columns[0][j] = larger_magnitude(of_columns[0][j], x.of_gate);
        of_columns[1][j] = larger_magnitude(of_columns[1][j], x.of_up);
        float& of_activated = of_columns[2][kBlocks ? 0 : j];
        of_activated = larger_magnitude(of_activated, __fmul_rn(weight, x.activated));
        product = __fmaf_rn(grad, x.activated, product);
      }
      memory.products[row + i][threadIdx.x % kLanes] = product;
    }
    targets.store(args, row, values, amax);
    of_grad += memory.grad.distance(1, 0), of_gate += memory.saved[0].distance(1, 0);
    end_copy_group();  // an empty one, so that the next step waits for as many
  }
}

// Adds up what the threads of each row have found.
template <bool kIsFp8>
__device__ void store_products(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory) {
  __syncthreads();
  const uint32_t row = threadIdx.x;
  if (row < tile.rows.num_rows) {
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kLanes / 4; ++i) {
      const float4 four = reinterpret_cast<const float4*>(memory.products[row])[i];
      sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(four.x, four.y), __fadd_rn(four.z, four.w)));
    }
    args.partial_sums[static_cast<int64_t>(tile.index) * args.num_rows + tile.rows.first_row + row] = sum;
    memory.weights[row] = __fadd_rn(memory.weights[row], 0);  // -0 becomes 0, for the second pass
  }
  __syncthreads();
}

// Makes the scales of columns of what all threads have found. If kBlocks, weighted `a` has a single one, whose divider
// is in the place of the first column's.
template <bool kIsFp8, bool kBlocks>
__device__ void find_scales(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory,
                            float (&of_columns)[kResults][kColumns]) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kOfColumns<kBlocks>; ++i) {
    float* target = memory.amax[warp][i] + lane % kLanes * kColumns;
    uint32_t words[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const uint32_t word = __float_as_uint(of_columns[i][j]);
      words[j] = max(word, __shfl_xor_sync(0xffffffff, word, kLanes));
    }
    if (lane < kLanes) {
      reinterpret_cast<uint4*>(target)[0] = {words[0], words[1], words[2], words[3]};
      reinterpret_cast<uint4*>(target)[1] = {words[4], words[5], words[6], words[7]};
    }
  }
  if constexpr (kBlocks) {
    const uint32_t word = __reduce_max_sync(0xffffffff, __float_as_uint(of_columns[2][0]));
    if (lane == 0) memory.amax[warp][2][0] = __uint_as_float(word);
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kOfColumns<kBlocks> * kTile + (kBlocks ? 1 : 0); i += kThreads) {
    const uint32_t result = i / kTile, in_tile = i % kTile, column = tile.first_column + in_tile;
    uint32_t amax = 0;
#pragma unroll
    for (int j = 0; j < kThreads / kWarp; ++j) amax = max(amax, __float_as_uint(memory.amax[j][result][in_tile]));
    const Scale scale(amax, false, args.min_amax);
    memory.dividers[result][in_tile] = scale;
    if (column >= args.size) continue;
    if (result == 2) {
      const uint32_t place = kBlocks ? tile.index : column;
      args.activated_scales[tile.block * args.activated_scale_pitch + place] = scale.scale_inv;
    } else {
      args.gate_up_scales[tile.block * args.gate_up_scale_pitch + result * args.size + column] = scale.scale_inv;
    }
  }
  __syncthreads();
}

// Where a thread stores codes of columns: of the first of its columns, gate's and up's and `a`'s.
struct ColumnTargets {
  uint8_t* codes[kResults];
  uint32_t column, first_row;  // in the tile

  __device__ ColumnTargets(const Arguments& args, const Tile& tile)
      : column(threadIdx.x / kWarp * kUnits * 8 + threadIdx.x % 4 * 2), first_row(threadIdx.x % kWarp / 4 * kUnitRows) {
    const int64_t line = static_cast<int64_t>(tile.block) * args.size, of_all = tile.first_column + column;
    codes[0] = args.gate_up_columns + (2 * line + of_all) * kTile + first_row;
    codes[1] = codes[0] + static_cast<int64_t>(args.size) * kTile;
    codes[2] = args.activated_columns + (line + of_all) * kTile + first_row;
  }
};

// Makes zeros of the codes of rows that do not exist: zeros that NaN has divided are none.
__device__ inline void clear_codes(uint8_t* codes, uint32_t num_rows) {
#pragma unroll 1
  for (uint32_t row = num_rows; row < kUnitRows; ++row) codes[row] = 0;
}

// Codes of two columns and sixteen rows, which lie side by side. The eight threads of a column store a line of 128 B.
template <bool kIsLimited, bool kIsFp8, bool kBlocks>
__device__ void store_columns(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory,
                              const ColumnTargets& targets, uint32_t unit) {
  const uint32_t first_row = targets.first_row, column = targets.column + unit * 8;
  const uint8_t *of_grad = memory.grad.at(first_row, column), *of_gate = memory.saved[0].at(first_row, column);
  Divider dividers[kResults][2];
#pragma unroll
  for (int i = 0; i < kOfColumns<kBlocks>; ++i) {
    const float4 both = *reinterpret_cast<const float4*>(&memory.dividers[i][column]);
    dividers[i][0] = {both.x, both.y}, dividers[i][1] = {both.z, both.w};
  }
  if constexpr (kBlocks) dividers[2][0] = dividers[2][1] = memory.dividers[2][0];
  uint32_t codes[kResults][2][kUnitRows / 4];
#pragma unroll
  for (int q = 0; q < kUnitRows / 4; ++q) {
    const uint32_t four = first_row + 4 * q;
    float weights[4], scales[2][4];
    *reinterpret_cast<float4*>(weights) = *reinterpret_cast<const float4*>(&memory.weights[four]);
    if constexpr (kIsFp8) {
      *reinterpret_cast<float4*>(scales[0]) = *reinterpret_cast<const float4*>(&memory.scales[0][four]);
      *reinterpret_cast<float4*>(scales[1]) = *reinterpret_cast<const float4*>(&memory.scales[1][four]);
    }
    float quotients[kResults][2][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      Part<kIsFp8, 2> part;
      part.load(of_grad + memory.grad.distance(0, 4 * q + r), of_gate + memory.saved[0].distance(0, 4 * q + r));
      const float weight = weights[r];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const SwigluGradient x =
            differentiate_swiglu<kIsLimited>(part.grad_at(j), weight, part.saved_at(0, j, scales[0][r]),
                                             part.saved_at(1, j, scales[1][r]), args.limit);
        quotients[0][j][r] = dividers[0][j].divide(x.of_gate);
        quotients[1][j][r] = dividers[1][j].divide(x.of_up);
        quotients[2][j][r] = dividers[2][j].divide(__fmul_rn(weight, x.activated));
      }
    }
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* x = quotients[i][j];
        codes[i][j][q] = encode_e4m3(x[0], x[1], x[2], x[3]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (tile.first_column + column + j >= args.size) return;
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
      uint8_t* target = targets.codes[i] + (unit * 8 + j) * kTile;
      *reinterpret_cast<uint4*>(target) = {codes[i][j][0], codes[i][j][1], codes[i][j][2], codes[i][j][3]};
      if (tile.rows.num_rows < first_row + kUnitRows)
        clear_codes(target, max(tile.rows.num_rows, first_row) - first_row);
    }
  }
}

template <bool kIsLimited, bool kIsFp8, bool kBlocks>
__device__ void both_passes(const Arguments& args, const Tile& tile, Memory<kIsFp8>& memory) {
  float of_columns[kResults][kColumns] = {};
  first_pass<kIsLimited, kIsFp8, kBlocks>(args, tile, memory, of_columns);
  store_products(args, tile, memory);
  find_scales<kIsFp8, kBlocks>(args, tile, memory, of_columns);
  const ColumnTargets targets(args, tile);
  if (targets.first_row >= (tile.rows.num_rows + 31) / 32 * 32) return;
#pragma unroll 1
  for (uint32_t unit = 0; unit < kUnits; ++unit)
    store_columns<kIsLimited, kIsFp8, kBlocks>(args, tile, memory, targets, unit);
}

// rows = quantize_1x128(d), columns = quantize_128x1(d) and quantize_128x1(w * a), where d = w * grad * d a / d [gate |
// up]. partial_sums = <grad, a> of the tile's columns.
// kBlocks: activated_scales[b, j] is that of 128 columns, j's, and of all rows of b, for all codes of w * a there.
// Grid: a CTA of 256 threads owns 128 rows of one expert and 128 columns of I; neighbouring CTAs the next columns.
// Shared memory: `Memory`.
// Barriers: one behind the weights of rows, two around sums and two around scales of columns; sixteen lanes meet in
// shuffles. In the first pass each thread reads what it has copied itself, so it waits for no others.
// Alignment: rows of grad and of what is BF16 are at multiples of 16 B, those of `rows` of 8 B, column codes of 16 B;
// codes of gate and up at 8 B, or anywhere if 8 does not divide I. All may end anywhere.
template <bool kIsFp8, bool kBlocks>
__global__ void __launch_bounds__(kThreads, 2) swiglu_columns_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(16) int memory[];
  Memory<kIsFp8>& shared = *reinterpret_cast<Memory<kIsFp8>*>(memory);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Tile tile(args);
  if (tile.rows.num_rows == 0) return;
  copy_tile(args, tile, shared);
  copy_factors(args, tile, shared);
  __syncthreads();
  if (args.limit < __uint_as_float(kInfinity)) {
    both_passes<true, kIsFp8, kBlocks>(args, tile, shared);
  } else {
    both_passes<false, kIsFp8, kBlocks>(args, tile, shared);
  }
}

// ---- Gradients of weights ----

// of_weights[t, j] = the sum of the partial sums of the choice's row, in the order of the tiles; 0 without a row.
// Grid: a thread owns a choice, and has kAtOnce loads under way. No shared memory, no barriers, no alignment.
template <int kAtOnce>
__global__ void __launch_bounds__(kThreads) swiglu_columns_sums_kernel(const __grid_constant__ Arguments args) {
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
