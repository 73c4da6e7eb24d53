// The float types that kernels read: one template argument for each.
#pragma once
#include "base.cuh"

enum class Input { kBFloat16, kHalf, kFloat };

__device__ inline float half_to_float(uint32_t low_bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(low_bits)));
  return x;
}

// The i-th of four E4M3 codes, the first in the lowest byte.
__device__ inline float decode_e4m3(uint32_t codes, int i) {
  uint32_t two;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(static_cast<uint16_t>(i < 2 ? codes : codes >> 16)));
  return half_to_float(i % 2 ? two >> 16 : two);
}

// The element at an address, which is a multiple of its size.
template <Input kInput>
__device__ inline float load_float(const uint8_t* address) {
  if constexpr (kInput == Input::kFloat) return *reinterpret_cast<const float*>(address);
  const uint32_t half = *reinterpret_cast<const uint16_t*>(address);
  if constexpr (kInput == Input::kBFloat16) return __uint_as_float(half << 16);
  return half_to_float(half);
}

template <Input kInput>
constexpr int kBytesOf = kInput == Input::kFloat ? 4 : 2;

// The nearest BF16 number, of equally near ones the even one.
__device__ inline uint16_t bfloat16_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}

__device__ inline uint16_t half_bits(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// Stores an element at such an address, rounded to the nearest.
template <Input kInput>
__device__ inline void store_float(uint8_t* address, float x) {
  if constexpr (kInput == Input::kFloat) *reinterpret_cast<float*>(address) = x;
  else *reinterpret_cast<uint16_t*>(address) = kInput == Input::kBFloat16 ? bfloat16_bits(x) : half_bits(x);
}
