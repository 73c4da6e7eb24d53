// A block of 128 neighbouring elements of a token, which eight threads quantize, 16 of them each.
#pragma once
#include "fp8.cuh"

constexpr int kBlock = 128;
constexpr int kLanes = 8;
constexpr int kColumns = kBlock / kLanes;

// What a thread holds of a block of floats. All threads of a warp call its functions.
template <Input kInput>
struct Floats {
  static constexpr bool kAreCodes = false;
  Eight<kInput> x[2];

  // The block has `width` elements. Tokens are rows at x, which are x_row_bytes apart.
  template <bool kVectorized, class Tokens>
  __device__ void load(const Tokens& tokens, uint32_t token, uint32_t k_block, uint32_t column, uint32_t width) {
    const int64_t first_byte = static_cast<int64_t>(k_block) * kBlock * Eight<kInput>::kElementBytes;
    const uint8_t* block = tokens.x + token * tokens.x_row_bytes + first_byte;
    x[0].template load<kVectorized>(block, column, width);
    x[1].template load<kVectorized>(block, column + 8, width);
  }
  __device__ Scale scale(float min_amax) const {
    uint32_t amax = Eight<kInput>::amax(Eight<kInput>::larger(x[0].largest(), x[1].largest()));
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      amax = max(amax, __shfl_xor_sync(0xffffffff, amax, distance));
    }
    return Scale(amax, false, min_amax);
  }
  __device__ uint4 codes(const Scale& scale) const {
    const uint2 low = x[0].e4m3(scale), high = x[1].e4m3(scale);
    return {low.x, low.y, high.x, high.y};
  }
};
