// The gradient of the router's choice on Hopper: from that of top_k_weights to that of the logits.
//
// Let g be the gradient of the weight of a chosen expert, times the scaling factor, and 0 of others; s a score; and
// the sums over all chosen experts. Where weights are divided by sum(s) + epsilon, their scores have the gradient
//   g <- (g - sum(g s) / (sum(s) + epsilon)) / (sum(s) + epsilon).
// The logits have s (g - sum(g s)) for s = softmax(logits), and g s (1 - s) for s = sigmoid(logits).
//
// Logits are given, or as sums, as for top_k.cu. With sums a gradient leaves as two BF16 numbers, of which the second
// is what the first lacks: then products in BF16 are as good as with 16 bits of its significand.
#include "top_k.cuh"

struct Arguments {
  const uint8_t* logits;            // [T, E]; or fp32 sums [parts, T, E]
  const float* grad;                // [T, k]
  const int64_t* top_k_index;       // [T, k]
  uint8_t* of_logits;               // [T, E] in the dtype of the logits; or bf16 [T, 3, E]: first, second, first
  int64_t row_bytes, expert_bytes;  // the distances from one to the next in logits
  int64_t num_tokens;
  uint32_t num_experts, top_k;
  uint32_t renormalize;
  float scaling_factor;
  uint32_t tokens_of_cta;  // at most one for each warp
  uint32_t num_parts;      // of sums
};

// The experts of this lane: scores, what is chosen among them, and the gradients of scores.
template <int kItems>
struct Scores {
  float of[kItems], grads[kItems];
  bool is_chosen[kItems];

  // Reads whom the token chose.
  __device__ void read_choice(const Arguments& args, int64_t token) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) grads[i] = 0, is_chosen[i] = false;
    const int64_t* index = args.top_k_index + token * args.top_k;
    const float* grad = args.grad + token * args.top_k;
#pragma unroll 4
    for (uint32_t j = 0; j < args.top_k; ++j) {
      const int64_t expert = index[j];
      const float of_weight = args.scaling_factor * grad[j];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (expert == expert_of_lane(i)) grads[i] = of_weight, is_chosen[i] = true;
      }
    }
  }

  // From gradients of weights to those of scores.
  __device__ void divide_by_sum(float epsilon) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) total += is_chosen[i] ? of[i] : 0;
    total = sum_of_warp(total) + epsilon;
    const float mean = sum_of_products() / total;
#pragma unroll
    for (int i = 0; i < kItems; ++i) grads[i] = is_chosen[i] ? (grads[i] - mean) / total : 0;
  }

  // sum(g s)
  __device__ float sum_of_products() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) sum += is_chosen[i] ? grads[i] * of[i] : 0;
    return sum_of_warp(sum);
  }
};

template <Input kInput, bool kInTerms>
__device__ void store(const Arguments& args, int64_t token, uint32_t expert, float grad) {
  const int64_t row = token * args.num_experts;
  if constexpr (!kInTerms) {
    store_float<kInput>(args.of_logits + (row + expert) * kBytesOf<kInput>, grad);
  } else {
    const uint16_t first = bfloat16_bits(grad);
    const uint16_t second = bfloat16_bits(grad - __uint_as_float(static_cast<uint32_t>(first) << 16));
    uint16_t* terms = reinterpret_cast<uint16_t*>(args.of_logits) + 3 * row + expert;
    terms[0] = first;
    terms[args.num_experts] = second;
    terms[2 * args.num_experts] = first;
  }
}

// of_logits = the gradient of logits.
// Grid: a warp owns a token, a CTA up to kMaxWarps of them; its other warps help to add up sums.
// Shared memory: with sums, the logits of each warp, 128 kItems B.
// Barriers: those of a warp; with sums, logits are complete before they are read.
// Alignment: that of an element.
template <Input kInput, int kItems, int kParts, bool kBySigmoid>
__global__ void __launch_bounds__(kMaxThreads) top_k_backward_kernel(const __grid_constant__ Arguments args) {
  __shared__ RowsOf<kParts, kItems> rows;
  const Token<kInput> token(args);

  wait_for_previous_kernel();
  let_next_kernel_start();

  if constexpr (kParts > 0) add_up<kParts>(args, rows, [](float logit) { return logit; });
  if (!token.exists(args)) return;
  Scores<kItems> scores;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {  // all loads are in flight at once
    const uint32_t expert = min(expert_of_lane(i), args.num_experts - 1);
    if constexpr (kParts > 0) scores.of[i] = rows[expert];
    else scores.of[i] = token.logit(expert);
  }
  scores.read_choice(args, token.index);
  if constexpr (kBySigmoid) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) scores.of[i] = scores.is_chosen[i] ? sigmoid(scores.of[i]) : 0;
  } else {
    float largest = scores.of[0];
#pragma unroll
    for (int i = 1; i < kItems; ++i) largest = fmaxf(largest, scores.of[i]);
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      scores.of[i] = expert_of_lane(i) < args.num_experts ? expf(scores.of[i] - largest) : 0;
      sum += scores.of[i];
    }
    sum = sum_of_warp(sum);
#pragma unroll
    for (int i = 0; i < kItems; ++i) scores.of[i] = __fdiv_rn(scores.of[i], sum);
  }
  if (args.renormalize) scores.divide_by_sum(kBySigmoid ? 1e-20f : 0);
  const float mean = kBySigmoid ? 0 : scores.sum_of_products();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t expert = expert_of_lane(i);
    if (expert >= args.num_experts) continue;
    const float s = scores.of[i], g = scores.grads[i];
    float grad = s * (g - mean);
    if constexpr (kBySigmoid) grad = g * s * (1 - s);
    store<kInput, (kParts > 0)>(args, token.index, expert, grad);
  }
}
