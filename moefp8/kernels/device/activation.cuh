// The gradient of SwiGLU at one place, and what gate and up are decoded from.
#pragma once
#include "fp8.cuh"

// The i-th of four E4M3 codes, the first in the lowest byte.
__device__ inline float decode_e4m3(uint32_t codes, int i) {
  uint32_t two;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(static_cast<uint16_t>(i < 2 ? codes : codes >> 16)));
  return half_to_float(i % 2 ? two >> 16 : two);
}

struct ActivationGradient {
  float of_gate, of_up, activated;
};

// With sigma the sigmoid, d silu / d gate = sigma (1 + gate (1 - sigma)). Where the limit holds, there is no gradient.
// of_activated, weight: the gradient of what is activated is their product.
template <bool kIsLimited>
__device__ inline ActivationGradient differentiate_activation(float of_activated, float weight, float gate, float up,
                                                      float limit) {
  constexpr float kLog2E = 1.4426950408889634f;
  const bool gate_is_held = kIsLimited && gate > limit, up_is_held = kIsLimited && fabsf(up) > limit;
  const float g = gate_is_held ? limit : gate, u = up_is_held ? copysignf(limit, up) : up;
  float exponential, sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(__fmul_rn(g, -kLog2E)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(__fadd_rn(exponential, 1)));
  const float silu = __fmul_rn(g, sigmoid), slope = sigmoid * __fmaf_rn(g, 1 - sigmoid, 1);
  const float weighted = weight * of_activated;
  ActivationGradient result;
  result.of_gate = gate_is_held ? 0 : weighted * u * slope;
  result.of_up = up_is_held ? 0 : weighted * silu;
  result.activated = silu * u;
  return result;
}
