// The router's choice on Hopper: the k best of E experts for each token, and top_k_weights.
//
// A warp owns a token. A lane holds every 32nd expert as an integer that rises with the expert's score;
// then, k times, the warp finds the largest one and takes it out.
//
// Logits are given; or, with kParts > 0, as the sums that logits.cu leaves, kParts of them for each group of chunks.
// Then all threads of a CTA add them up, and all but the sums is read before the kernel that writes them is over.
#include "top_k.cuh"

struct Arguments {
  const uint8_t* logits;           // [T, E]; or fp32 sums [parts, T, E]
  const float* bias;               // [E] or null
  int64_t* top_k_index;            // [T, k]
  float* top_k_weights;            // [T, k]
  int64_t row_bytes, expert_bytes;  // the distances from one to the next in logits
  int64_t num_tokens;
  uint32_t num_experts, top_k;
  uint32_t num_groups, topk_groups;
  uint32_t group_lanes;  // how many find the best two of a group: a power of two
  uint32_t renormalize;
  float scaling_factor;
  uint32_t tokens_of_cta;     // at most one for each warp
  uint32_t num_parts;         // of sums
};

// Keys lie in the order of the numbers: equal numbers have equal keys, -0 has that of +0, NaN has the largest.
// No number has the key 0.
constexpr uint32_t kNoKey = 0, kLowestKey = 0x007fffff, kNanKey = 0xffffffff;  // lowest: -Inf
__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0));
  if (x != x) return kNanKey;
  return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ inline float number_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key);
}

// The experts that can still be chosen; lane l holds kWarp i + l in keys[i].
template <int kItems>
struct Candidates {
  uint32_t keys[kItems];
  uint32_t best, best_expert;  // the best of this lane

  __device__ static uint32_t expert(int i) { return expert_of_lane(i); }

  __device__ void find_best() {
    best = keys[0];
#pragma unroll
    for (int i = 1; i < kItems; ++i) best = max(best, keys[i]);
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      if (keys[i] == best) best_expert = expert(i);
    }
  }

  // The best expert of the warp: of equals, the one with the lowest id.
  __device__ uint32_t take_best() {
    find_best();
    const uint32_t key = __reduce_max_sync(kAllLanes, best);
    const uint32_t taken = __reduce_min_sync(kAllLanes, best == key ? best_expert : kAllLanes);
#pragma unroll
    for (int i = 0; i < kItems; ++i) keys[i] = expert(i) == taken ? kNoKey : keys[i];
    return taken;
  }
};

// What the lanes of a warp tell one another.
template <int kItems>
struct Choice {
  uint32_t expert[kItems * kWarp];
  float weight[kItems * kWarp];
};
template <int kItems>
struct Groups {
  uint32_t keys[kItems * kWarp];
  uint32_t strengths[kItems * kWarp];
};

// Chooses k times and writes experts and top_k_weights: score(expert), if asked for divided by (the sum of all k
// + epsilon), times the scaling factor. The sum is taken in order, as by the CPU body.
template <Input kInput, int kItems, class Score>
__device__ void choose(const Arguments& args, const Token<kInput>& token, Candidates<kItems>& candidates,
                       Choice<kItems>& choice, float epsilon, const Score& score) {
  const uint32_t lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (uint32_t j = 0; j < args.top_k; ++j) {
    const uint32_t expert = candidates.take_best();
    if (lane == 0) choice.expert[j] = expert;
  }
  __syncwarp();
#pragma unroll 1
  for (uint32_t j = lane; j < args.top_k; j += kWarp) choice.weight[j] = score(choice.expert[j]);
  __syncwarp();
  float sum = choice.weight[0];
#pragma unroll 1
  for (uint32_t j = 1; j < args.top_k; ++j) sum = __fadd_rn(sum, choice.weight[j]);
  const float divisor = args.renormalize ? __fadd_rn(sum, epsilon) : 1;
#pragma unroll 1
  for (uint32_t j = lane; j < args.top_k; j += kWarp) {
    const int64_t at = token.index * args.top_k + j;
    args.top_k_index[at] = choice.expert[j];
    args.top_k_weights[at] = __fmul_rn(__fdiv_rn(choice.weight[j], divisor), args.scaling_factor);
  }
}

// top_k_weights = softmax(logits) of the k experts with the largest logits.
// Grid: a warp owns a token, a CTA up to kMaxWarps of them; its other warps help to add up sums.
// Shared memory: the choice of each warp, 256 kItems B, and with sums its logits, 128 kItems B.
// Barriers: those of a warp; with sums, logits are complete before they are read.
// Alignment: that of an element.
template <Input kInput, int kItems, int kParts>
__global__ void __launch_bounds__(kMaxThreads) softmax_topk_kernel(const __grid_constant__ Arguments args) {
  __shared__ Choice<kItems> choices[kMaxWarps];
  __shared__ RowsOf<kParts, kItems> rows;
  const Token<kInput> token(args);

  wait_for_previous_kernel();
  let_next_kernel_start();

  if constexpr (kParts > 0) add_up<kParts>(args, rows, [](float logit) { return logit; });
  if (!token.exists(args)) return;
  const auto logit = [&](uint32_t expert) {
    if constexpr (kParts > 0) return rows[expert];
    else return token.logit(expert);
  };
  Candidates<kItems> candidates;
  uint32_t best = kNoKey;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t expert = candidates.expert(i);
    const uint32_t key = key_of(logit(min(expert, args.num_experts - 1)));
    candidates.keys[i] = expert < args.num_experts ? key : kNoKey;
    best = max(best, key);
  }
  const float largest = number_of(__reduce_max_sync(kAllLanes, best));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (candidates.keys[i] != kNoKey) sum += expf(number_of(candidates.keys[i]) - largest);
  }
  sum = sum_of_warp(sum);
  const auto score = [&](uint32_t expert) { return __fdiv_rn(expf(logit(expert) - largest), sum); };
  choose(args, token, candidates, choices[threadIdx.x / kWarp], 0, score);
}

// Gives all experts but those of the `topk_groups` strongest groups the score -Inf. A group is as strong
// as the sum of its two best scores; of equals the first one stays.
template <int kItems>
__device__ void close_groups(const Arguments& args, Candidates<kItems>& candidates, Groups<kItems>& groups) {
  const uint32_t lane = threadIdx.x % kWarp, size = args.num_experts / args.num_groups, lanes = args.group_lanes;
#pragma unroll
  for (int i = 0; i < kItems; ++i) groups.keys[candidates.expert(i)] = candidates.keys[i];
  __syncwarp();
#pragma unroll 1
  for (uint32_t first = 0; first < args.num_groups; first += kWarp / lanes) {
    const uint32_t group = first + lane / lanes;
    const bool exists = group < args.num_groups;
    uint32_t best = kNoKey, second = kNoKey;
#pragma unroll 1
    for (uint32_t i = lane % lanes; exists && i < size; i += lanes) {
      const uint32_t key = groups.keys[group * size + i];
      second = max(second, min(best, key));
      best = max(best, key);
    }
#pragma unroll 1
    for (uint32_t distance = lanes / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, best, distance);
      second = max(max(second, __shfl_xor_sync(kAllLanes, second, distance)), min(best, other));
      best = max(best, other);
    }
    if (exists && lane % lanes == 0) {
      groups.strengths[group] = size == 1 ? best : key_of(__fadd_rn(number_of(best), number_of(second)));
    }
  }
  __syncwarp();
#pragma unroll 1
  for (uint32_t group = lane; group < args.num_groups; group += kWarp) {
    const uint32_t strength = groups.strengths[group];
    uint32_t rank = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < args.num_groups; ++i) {
      rank += groups.strengths[i] > strength || (groups.strengths[i] == strength && i < group);
    }
    groups.keys[group] = rank < args.topk_groups;  // from here on: whether it is open
  }
  __syncwarp();
  const uint32_t inverse = ((1 << 18) + size - 1) / size;  // exact for up to 512 experts
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t expert = candidates.expert(i);
    if (expert < args.num_experts && !groups.keys[expert * inverse >> 18]) candidates.keys[i] = kLowestKey;
  }
}

// top_k_weights = sigmoid(logits) of the k experts with the largest sigmoid(logits) + bias in the open groups.
// Grid: a warp owns a token, a CTA up to kMaxWarps of them; its other warps help to add up sums.
// Shared memory: the choice and the groups of each warp, 512 kItems B, and with sums its sigmoids, 128 kItems B.
// Barriers: those of a warp; with sums, sigmoids are complete before they are read.
// Alignment: that of an element.
template <Input kInput, int kItems, int kParts>
__global__ void __launch_bounds__(kMaxThreads) sigmoid_group_topk_kernel(const __grid_constant__ Arguments args) {
  __shared__ Choice<kItems> choices[kMaxWarps];
  __shared__ Groups<kItems> groups[kMaxWarps];
  __shared__ RowsOf<kParts, kItems> rows;
  const Token<kInput> token(args);
  float biases[kItems];  // they are older than the kernel before
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t expert = Candidates<kItems>::expert(i);
    biases[i] = args.bias && expert < args.num_experts ? args.bias[expert] : 0;
  }

  wait_for_previous_kernel();
  let_next_kernel_start();

  if constexpr (kParts > 0) add_up<kParts>(args, rows, sigmoid);
  if (!token.exists(args)) return;
  Candidates<kItems> candidates;
  float scores[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {  // all loads are in flight at once
    const uint32_t expert = min(candidates.expert(i), args.num_experts - 1);
    if constexpr (kParts > 0) scores[i] = rows[expert];
    else scores[i] = token.logit(expert);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if constexpr (kParts == 0) scores[i] = sigmoid(scores[i]);
    if (args.bias) scores[i] = __fadd_rn(scores[i], biases[i]);
    candidates.keys[i] = candidates.expert(i) < args.num_experts ? key_of(scores[i]) : kNoKey;
  }
  if (args.topk_groups < args.num_groups) close_groups(args, candidates, groups[threadIdx.x / kWarp]);
  const auto score = [&](uint32_t expert) {
    if constexpr (kParts > 0) return rows[expert];
    else return sigmoid(token.logit(expert));
  };
  choose(args, token, candidates, choices[threadIdx.x / kWarp], 1e-20f, score);
}
