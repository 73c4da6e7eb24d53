// Division by a number that only the host knows.
#pragma once
#include "base.cuh"

// Divides numbers below 2^31: n / value == n * magic >> shift.
struct Divisor {
  uint32_t value, magic, shift;

  __device__ uint32_t quotient(uint32_t n) const { return static_cast<uint64_t>(n) * magic >> shift; }
};
