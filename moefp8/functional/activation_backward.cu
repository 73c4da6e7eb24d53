// The gradient of the activation, between the two GEMMs of a backward of experts: that of gate and up, in E4M3.
// For gradients of adapters, the kernel also stores them in BF16, with the weights of rows; for those of a trained
// feed-forward, in BF16 alone.
//
// The forward multiplied a = f(gate) * up by W_down, and the result by the weight of a choice. A CTA reads one row
// of the gradient of `a`, not yet times that weight, and the saved gate and up. It recomputes `a`, whose dot product
// with the gradient is the gradient of the weight.
#include "activation.cuh"
#include "fp8.cuh"
#include "input.cuh"
#include "matrix.cuh"

constexpr int kBlock = 128;
constexpr int kColumns = 8;                // of a thread, side by side
constexpr int kThreads = 128;
constexpr int kLanes = kBlock / kColumns;  // threads that share a block, and so a scale

struct Arguments {
  const uint8_t* grad;       // bf16 [R, I]: the gradient of `a`, not yet times a weight
  int64_t grad_row_bytes;    // the pitch of its rows, a multiple of 16
  const uint8_t* saved;      // gate and up: bf16 [R, 2, I], or E4M3 [R, 2, I] without gaps
  int64_t saved_row_bytes;   // the pitch of rows of I
  const float* saved_scales; // [I/128, pitch], where row r has 2 r for gate and 2 r + 1 for up
  int64_t saved_scale_pitch;
  const int* token_to_row;   // [T, k]; -1: no row. Null: choice i has row i, and no weight
  const uint8_t* weights;    // [T, k]
  int64_t weight_token_bytes, weight_choice_bytes;
  uint8_t* rows;             // E4M3 [R, 2, padded I]: gradients of gate and of up; null: not stored
  int64_t row_pitch;         // of [2, padded I]
  float* row_scales;         // [2 * padded I / 128, pitch], rows innermost
  int64_t scale_pitch;
  uint8_t* bf16_rows;        // bf16 [R, 2, I], the same gradients; null: not stored
  int64_t bf16_row_bytes;    // the pitch of its rows of I, a multiple of 16
  float* weight_of_row;      // [R], the weight that a row is multiplied by; null: not stored
  float* of_weights;         // [T, k]
  float* is_first;           // [T, k]: 1 for the first choice of a row, 0 for others
  uint32_t num_choices, top_k, size, padded_size;
  ActivationArguments activation;
  float min_amax;
};

__device__ inline void zero_from(Eight<Input::kBFloat16>& x, uint32_t first) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i >= first) x.words[i / 2] &= i % 2 ? 0xffff : 0xffff0000;
  }
}

// Eight neighbouring saved elements of gate or of up.
template <bool kIsFp8>
struct Saved {
  Eight<Input::kBFloat16> eight;

  __device__ void load(const Arguments& args, int64_t row, uint32_t column) {
    eight.load_once(args.saved + row * args.saved_row_bytes, column);
  }
  __device__ void end_at(uint32_t count) { zero_from(eight, count); }
  __device__ float operator[](int i) const { return eight[i]; }
};
template <>
struct Saved<true> {
  uint32_t codes[2];
  float scale;

  __device__ void load(const Arguments& args, int64_t row, uint32_t column) {
    const uint8_t* source = args.saved + row * args.saved_row_bytes;
    if (args.size % kColumns == 0) {
      const uint2 both = *reinterpret_cast<const uint2*>(source + column);
      codes[0] = both.x, codes[1] = both.y;
    } else {
      codes[0] = codes[1] = 0;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (column + i < args.size) codes[i / 4] |= uint32_t(source[column + i]) << i % 4 * 8;
      }
    }
    scale = args.saved_scales[column / kBlock * args.saved_scale_pitch + row];
  }
  __device__ void end_at(uint32_t) {}  // `load` has written zeros there
  __device__ float operator[](int i) const { return __fmul_rn(decode_e4m3(codes[i / 4], i % 4), scale); }
};

// The elements of a row that a thread reads, from `column` on; zeros after the end of the row.
template <bool kIsFp8>
struct Part {
  Eight<Input::kBFloat16> grad;
  Saved<kIsFp8> gate, up;

  __device__ void load(const Arguments& args, int64_t row, uint32_t column) {
    if (column >= args.size) return;
    grad.load_once(args.grad + row * args.grad_row_bytes, column);
    gate.load(args, 2 * row, column);
    up.load(args, 2 * row + 1, column);
    if (column + kColumns > args.size) {
      const uint32_t count = args.size - column;
      zero_from(grad, count), gate.end_at(count), up.end_at(count);
    }
  }
};

// The results of a thread for its eight columns.
struct Gradients {
  float gate[kColumns], up[kColumns];
  float of_weight = 0;  // the sum of grad times `a`
};

template <Activation kKind, bool kIsLimited, bool kIsFp8>
__device__ Gradients differentiate_columns(const Arguments& args, const Part<kIsFp8>& part, float weight) {
  Gradients result;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const float gate = part.gate[i], up = part.up[i], grad = part.grad[i];
    const ActivationGradient x = differentiate<kKind, kIsLimited>(grad, weight, gate, up, args.activation);
    result.gate[i] = x.grad_gate, result.up[i] = x.grad_up;
    result.of_weight = __fmaf_rn(grad, x.activated, result.of_weight);
  }
  return result;
}

// Quantizes a block into a row of `rows`. kLanes threads hold eight columns of it each. The whole warp calls it;
// `exists` says whether there is such a block.
__device__ inline void store_block(const Arguments& args, int64_t row, uint32_t column, const float (&x)[kColumns],
                                   bool exists) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) amax = max(amax, __float_as_uint(x[i]) & kMagnitude);
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    amax = max(amax, __shfl_xor_sync(0xffffffff, amax, distance));
  const Scale scale(amax, false, args.min_amax);
  uint32_t codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* four = x + 4 * i;
    codes[i] = encode_e4m3(scale.divide(four[0]), scale.divide(four[1]), scale.divide(four[2]), scale.divide(four[3]));
  }
  if (!exists) return;
  *reinterpret_cast<uint2*>(args.rows + row * args.row_pitch + column) = {codes[0], codes[1]};
  if (threadIdx.x % kLanes == 0) args.row_scales[column / kBlock * args.scale_pitch + row] = scale.scale_inv;
}

// Stores eight columns in BF16; those after the end of the row go to the padding before the next one.
__device__ inline void store_eight(uint8_t* target, const float (&x)[kColumns]) {
  *reinterpret_cast<uint4*>(target) = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                                       pack_bf16(x[6], x[7])};
}

// The sum of the weights of all choices of a token that share `row`, and whether choice `mine` is the first of them.
// Each lane of a warp reads one choice at a time.
template <Input kWeights>
__device__ float weight_of_row(const Arguments& args, int64_t token, uint32_t mine, int row, bool& is_first) {
  const uint32_t lane = threadIdx.x % kWarp;
  const int* of_token = args.token_to_row + token * args.top_k;
  const uint8_t* weights = args.weights + token * args.weight_token_bytes;
  is_first = row >= 0;
  float sum = 0;
  for (uint32_t first = 0; first < args.top_k; first += kWarp) {
    const uint32_t i = first + lane;
    const bool is_same = i < args.top_k && of_token[i] == row;
    if (is_same) sum += load_float<kWeights>(weights + i * args.weight_choice_bytes);
    is_first &= !__any_sync(0xffffffff, is_same && i < mine);
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  return sum;
}

// rows = quantize_1x128(w * grad * d a / d [gate | up]); of_weights[t, j] = <grad, a> of the row of choice j of token t,
// where w is the sum of the weights of all choices of the row.
// Grid: a CTA of up to 128 threads owns a choice; the first choice of a row works for all of them.
// Shared memory: 16 B, a sum of each warp.
// Barriers: one, before these sums are added up; 16 lanes exchange values in shuffles.
// Alignment: rows of grad and of BF16 tensors begin at multiples of 16 B, those of `rows` at 8 B; all may end anywhere.
template <Activation kKind, Input kWeights, bool kIsFp8>
__global__ void __launch_bounds__(kThreads, 10) activation_backward_kernel(const __grid_constant__ Arguments args) {
  __shared__ float of_warps[kThreads / kWarp];
  const uint32_t choice = blockIdx.x, token = choice / args.top_k, mine = choice - token * args.top_k;
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int* of_token = args.token_to_row + static_cast<int64_t>(token) * args.top_k;
  const int row = args.token_to_row == nullptr ? choice : of_token[mine];
  uint32_t column = threadIdx.x * kColumns;
  Part<kIsFp8> part;
  part.load(args, max(row, 0), column);  // loads while the weight is computed
  float weight = 1;
  if (args.token_to_row != nullptr) {
    bool is_first;
    weight = weight_of_row<kWeights>(args, token, mine, row, is_first);
    if (threadIdx.x == 0) {
      args.is_first[choice] = is_first;
      if (row < 0) args.of_weights[choice] = 0;
      if (is_first && args.weight_of_row != nullptr) args.weight_of_row[row] = weight;
    }
    if (!is_first) return;
  }

  float of_weight = 0;
  for (uint32_t first = 0; first < args.padded_size; first += blockDim.x * kColumns) {  // whole blocks
    if (first > 0) {
      column += blockDim.x * kColumns;
      part.load(args, row, column);
    }
    Gradients gradients = {};
    if (column < args.size) {
      const bool is_limited = args.activation.limit < __uint_as_float(kInfinity);
      gradients = is_limited ? differentiate_columns<kKind, true>(args, part, weight)
                             : differentiate_columns<kKind, false>(args, part, weight);
      if (args.bf16_rows != nullptr) {
        uint8_t* target = args.bf16_rows + 2 * static_cast<int64_t>(row) * args.bf16_row_bytes + column * 2;
        store_eight(target, gradients.gate), store_eight(target + args.bf16_row_bytes, gradients.up);
      }
    }
    of_weight += gradients.of_weight;
    if (args.rows == nullptr) continue;
    const bool exists = column < args.padded_size;
    store_block(args, row, column, gradients.gate, exists);
    store_block(args, row, args.padded_size + column, gradients.up, exists);
  }
  if (args.token_to_row == nullptr) return;
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    of_weight += __shfl_xor_sync(0xffffffff, of_weight, distance);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = of_weight;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = of_warps[0];
  for (uint32_t i = 1; i < blockDim.x / kWarp; ++i) sum += of_warps[i];
  for (uint32_t i = mine; i < args.top_k; ++i) {
    if (of_token[i] == row) args.of_weights[choice - mine + i] = sum;
  }
}
