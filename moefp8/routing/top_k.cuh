// What the router's choice and its gradient share: a warp owns a token, and a lane every 32nd of up to 512 experts.
#pragma once
#include "input.cuh"
#include "sigmoid.cuh"

constexpr int kMaxWarps = 4;     // the most tokens of a CTA, one for each of its first warps
constexpr int kMaxThreads = 256;
constexpr uint32_t kAllLanes = 0xffffffff;

__device__ inline uint32_t expert_of_lane(int i) { return i * kWarp + threadIdx.x % kWarp; }

__device__ inline float sum_of_warp(float sum) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  return sum;
}

// The token of this warp.
template <Input kInput>
struct Token {
  int64_t index;
  const uint8_t* logits;
  int64_t expert_bytes;

  template <class Args>
  __device__ explicit Token(const Args& args)
      : index(static_cast<int64_t>(blockIdx.x) * args.tokens_of_cta + threadIdx.x / kWarp),
        logits(args.logits + index * args.row_bytes),
        expert_bytes(args.expert_bytes) {}

  template <class Args>
  __device__ bool exists(const Args& args) const {
    return threadIdx.x / kWarp < args.tokens_of_cta && index < args.num_tokens;
  }

  __device__ float logit(uint32_t expert) const { return load_float<kInput>(logits + expert * expert_bytes); }
};

// FP32 numbers of a CTA's tokens, a row for each.
template <int kItems>
struct Rows {
  float of_token[kMaxWarps][kItems * kWarp];

  __device__ float operator[](uint32_t expert) const { return of_token[threadIdx.x / kWarp][expert]; }
};
template <int kParts, int kItems>
using RowsOf = typename Select<(kParts > 0), Rows<kItems>, char>::Type;

// All threads: rows = map(logits), where a logit is the sum of those of the groups, and one of these is that of its
// parts, all in order.
template <int kParts, int kItems, class Args, class Map>
__device__ void add_up(const Args& args, Rows<kItems>& rows, const Map& map) {
  constexpr int kGroups = kParts == 1 ? 8 : 7, kAtOnce = kGroups * kParts;  // all these loads are in flight
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * args.tokens_of_cta;
  const uint32_t num_tokens = min(args.num_tokens - first_token, static_cast<int64_t>(args.tokens_of_cta));
  const int64_t stride = args.num_tokens * args.num_experts;
  const float* sums = reinterpret_cast<const float*>(args.logits) + first_token * args.num_experts;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < num_tokens * args.num_experts; i += blockDim.x) {
    float total = 0;
    const float* sum = sums + i;
#pragma unroll 1
    for (int left = args.num_parts; left > 0; left -= kAtOnce) {
      float v[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j, sum += stride) {
        v[j] = 0;
        if (j < left) v[j] = *sum;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; j += kParts) {
        float of_group = v[j];
#pragma unroll
        for (int k = 1; k < kParts; ++k) of_group = __fadd_rn(of_group, v[j + k]);
        total = __fadd_rn(total, of_group);
      }
    }
    const uint32_t token = i / args.num_experts;
    rows.of_token[token][i - token * args.num_experts] = map(total);
  }
  __syncthreads();
}
