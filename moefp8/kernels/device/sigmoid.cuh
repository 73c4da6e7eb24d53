// The sigmoid of an FP32 number, bit for bit that of `_sigmoid` in top_k.py.
#pragma once
#include "base.cuh"

// ln(2)^i / i!, the Taylor series of 2^x: |x| <= 1/2 leaves an error of 2.2e-13.
struct Exp2Terms {
  static constexpr int kCount = 11;
  double of[kCount];

  __device__ constexpr Exp2Terms() : of{1} {
    for (int i = 1; i < kCount; ++i) of[i] = of[i - 1] * 0.6931471805599453 / i;
  }
};

// 1 / (1 + exp(-x)) in FP64, rounded once. Each step is exactly rounded and none is contracted to an
// FMA, so that every device gets the same; FP32 magnitudes above 128 are at the limits 0 and 1.
__device__ inline float sigmoid(float x) {
  constexpr Exp2Terms kTerms;
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kRound = 0x1.8p52;  // adding it rounds to integers, which the low bits then hold
  const double power = __dmul_rn(fminf(fabsf(x), 128.f), -kLog2E);
  const double rounded = __dadd_rn(power, kRound);
  const double fraction = __dadd_rn(power, -__dadd_rn(rounded, -kRound));
  double e = kTerms.of[Exp2Terms::kCount - 1];  // exp(-|x|) = 2^power
#pragma unroll
  for (int i = Exp2Terms::kCount - 2; i >= 0; --i) e = __dadd_rn(__dmul_rn(e, fraction), kTerms.of[i]);
  e = __hiloint2double(__double2hiint(e) + (__double2loint(rounded) << 20), __double2loint(e));
  const double positive = __drcp_rn(__dadd_rn(1, e));
  const float result = __double2float_rn(x < 0 ? __dmul_rn(e, positive) : positive);
  return x == x ? result : x;
}
