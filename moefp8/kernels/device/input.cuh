// The float types that kernels read: one template argument for each.
#pragma once
#include "base.cuh"

enum class Input { kBFloat16, kHalf, kFloat };

__device__ inline float half_to_float(uint32_t low_bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(low_bits)));
  return x;
}

// The element at an address, which is a multiple of its size.
template <Input kInput>
__device__ inline float load_float(const uint8_t* address) {
  if constexpr (kInput == Input::kFloat) return *reinterpret_cast<const float*>(address);
  const uint32_t half = *reinterpret_cast<const uint16_t*>(address);
  if constexpr (kInput == Input::kBFloat16) return __uint_as_float(half << 16);
  return half_to_float(half);
}
