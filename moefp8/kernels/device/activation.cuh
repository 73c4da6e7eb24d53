// The activations of gated experts, f(gate) * up, and their gradients: `Activation` in common/activation.py.
#pragma once
#include "fp8.cuh"

enum class Activation { kSwiglu, kGeglu, kGegluTanh, kGptOss };

struct ActivationArguments {
  float limit;  // bounds gate from above and up on both sides; may be infinite
  float alpha;  // of kGptOss
};

constexpr float kLog2E = 1.4426950408889634f;

__device__ inline float exp2_approximately(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_approximately(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + 2^x), by two approximations of MUFU, each within 2 ulp.
__device__ inline float sigmoid_of_exponent(float x) {
  return reciprocal_approximately(__fadd_rn(exp2_approximately(x), 1));
}

// f(x) = x * share(x), and the derivative of f.
struct Gated {
  float value, slope;
};

// -log2(Phi(x) / Phi(-x)) / x for the normal distribution function Phi: a polynomial in x^2 that was fitted to |x| <= 5.
// x Phi(x) is then within 2e-7 max(1, |x|), and within 4e-5 of itself above -5. A sigmoid takes half the instructions
// of erff, and fewer registers.
__device__ inline float normal_exponent(float x) {
  float t = fminf(x * x, 25);
  asm volatile("" : "+f"(t));  // one polynomial after the other: registers do not suffice for several
  float sum = __fmul_rn(9.334492e-11f, __fadd_rn(t, -112.48329f));  // an instruction has room for one constant
  sum = fmaf(sum, t, 4.960071e-7f);
  sum = fmaf(sum, t, -1.2538258e-5f);
  sum = fmaf(sum, t, 1.645454e-4f);
  sum = fmaf(sum, t, 8.4327017e-5f);
  sum = fmaf(sum, t, -0.10482908f);
  return fmaf(sum, t, -2.302209f);
}

template <Activation kKind>
__device__ inline Gated gate_with(float x, float alpha) {
  if constexpr (kKind == Activation::kGeglu) {
    constexpr float kDensity = 0.39894228040143268f;  // 1 / sqrt(2 pi)
    const float share = sigmoid_of_exponent(x * normal_exponent(x));
    const float density = kDensity * exp2_approximately(x * x * (-0.5f * kLog2E));
    return {__fmul_rn(x, share), __fmaf_rn(x, density, share)};
  } else if constexpr (kKind == Activation::kGegluTanh) {
    constexpr float kScale = 1.5957691216057308f, kCubic = 0.044715f;  // kScale = 2 sqrt(2 / pi)
    const float exponent = __fmul_rn(__fmul_rn(x, -kLog2E * kScale * kCubic), __fadd_rn(x * x, 1 / kCubic));
    const float share = sigmoid_of_exponent(exponent);
    const float near = fminf(fmaxf(x, -16), 16);  // beyond that, share (1 - share) is 0; x^3 may be infinite
    const float steepness = __fmul_rn(__fmul_rn(near, 3 * kScale * kCubic), __fadd_rn(near * near, 1 / (3 * kCubic)));
    return {__fmul_rn(x, share), share * __fmaf_rn(steepness, 1 - share, 1)};
  } else if constexpr (kKind == Activation::kGptOss) {
    const float steepness = __fmul_rn(x, alpha), share = sigmoid_of_exponent(__fmul_rn(steepness, -kLog2E));
    return {__fmul_rn(x, share), share * __fmaf_rn(steepness, 1 - share, 1)};
  } else {
    const float share = sigmoid_of_exponent(__fmul_rn(x, -kLog2E));
    return {__fmul_rn(x, share), share * __fmaf_rn(x, 1 - share, 1)};
  }
}

// min and max that keep NaN, as torch.clamp does.
__device__ inline float min_or_nan(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
__device__ inline float max_or_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// What multiplies f(gate).
template <Activation kKind>
__device__ inline float factor_of(float up) {
  return kKind == Activation::kGptOss ? up + 1 : up;
}

template <Activation kKind>
__device__ inline float activate(float gate, float up, float alpha) {
  return __fmul_rn(gate_with<kKind>(gate, alpha).value, factor_of<kKind>(up));
}

// gate = f(gate) * up.
template <Activation kKind, int kSize>
__device__ void activate(float (&gate)[kSize], float (&up)[kSize], const ActivationArguments& args) {
  // An infinite limit changes nothing. kGeglu has no registers for a second path without limits.
  if (kKind == Activation::kGeglu || args.limit < __uint_as_float(kInfinity)) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      gate[i] = min_or_nan(gate[i], args.limit);
      up[i] = max_or_nan(min_or_nan(up[i], args.limit), -args.limit);
    }
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) gate[i] = activate<kKind>(gate[i], up[i], args.alpha);
}

struct ActivationGradient {
  float grad_gate, grad_up, activated;
};

// Where the limit holds, there is no gradient. The gradient of the activated value is grad * weight.
template <Activation kKind, bool kIsLimited>
__device__ inline ActivationGradient differentiate(float grad, float weight, float gate, float up,
                                                   const ActivationArguments& args) {
  const bool gate_is_held = kIsLimited && gate > args.limit, up_is_held = kIsLimited && fabsf(up) > args.limit;
  const float factor = factor_of<kKind>(up_is_held ? copysignf(args.limit, up) : up);
  const Gated gated = gate_with<kKind>(gate_is_held ? args.limit : gate, args.alpha);
  const float weighted = weight * grad;
  ActivationGradient result;
  result.grad_gate = gate_is_held ? 0 : weighted * factor * gated.slope;
  result.grad_up = up_is_held ? 0 : weighted * gated.value;
  result.activated = gated.value * factor;
  return result;
}
