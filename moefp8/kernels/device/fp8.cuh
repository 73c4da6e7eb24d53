// E4M3: the scale of a block, division by it, and eight elements of any input type with their codes.
#pragma once
#include "input.cuh"
#include "l2.cuh"

constexpr uint32_t kInfinity = 0x7f800000;  // as bits; NaN has larger ones, other magnitudes smaller ones
constexpr uint32_t kNan = 0x7fc00000;
constexpr uint32_t kMagnitude = 0x7fffffff;  // all bits but the sign

// Divides by the scale of a block: what `Scale` has found, in a form that threads can pass on.
struct Divider {
  float divisor, reciprocal;

  __device__ float divide(float x) const {
    const float quotient = __fmul_rn(x, reciprocal);
    const float negative_residual = __fmaf_rn(divisor, quotient, -x);
    return __fmaf_rn(negative_residual, -reciprocal, quotient);
  }
};

// The scale of a block, from its largest magnitude; each thread of the block makes the same one.
//
// Both divisions round correctly without dividing: multiply by the rounded reciprocal, then correct
// once by the residual, which an FMA gives exactly (Markstein, IBM J. Res. Dev. 34(1), 1990).
// - Where the quotient decides, a scale lies between 2^-60 / 448 and 2^120, so neither it nor its
//   reciprocal is denormal, and no intermediate of a quotient above 2^-11 overflows or is denormal.
//   Mantissas alone count then, and these were checked exhaustively, with FMAs on a CPU:
//   amax / 448 for all 2^23 mantissas; x / scale for all 2^23 mantissas of the scale and every x
//   within 5 ulp of scale times one of the 16 mantissas halfway between two E4M3 numbers. Farther
//   away an error of 1 ulp changes no code.
// - Below 2^-11 the code is zero, however wrong the quotient. It keeps the sign of x, also that of a
//   zero: the residual is negated, so +0 times -reciprocal is -0, and any zero plus -0 is that zero.
// - A quotient is at most amax / scale_inv = 448 (1 + 2^-23): nothing overflows, the encoding saturates.
struct Scale : Divider {
  float scale_inv;  // what is stored

  // amax: bits of a magnitude; the larger the magnitude, the larger they are, and NaN has the largest.
  // min_amax: a smaller magnitude counts as that one; at least 2^-60.
  __device__ Scale(uint32_t amax, bool ue8m0, float min_amax = 1e-4f) {
    constexpr float kMax = 448, kMaxReciprocal = 1 / kMax;
    const float x = __uint_as_float(max(amax, __float_as_uint(min_amax)));
    const float quotient = __fmul_rn(x, kMaxReciprocal);
    scale_inv = __fmaf_rn(__fmaf_rn(kMax, quotient, -x), -kMaxReciprocal, quotient);
    // Rounds up to a power of two: any bit of the mantissa carries into the exponent.
    if (ue8m0) scale_inv = __uint_as_float((__float_as_uint(scale_inv) + 0x7fffff) & kInfinity);
    divisor = scale_inv;
    // One Newton step: what the compiler makes of __frcp_rn for numbers that are not denormal.
    float guess;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(divisor));
    reciprocal = __fmaf_rn(guess, __fmaf_rn(-divisor, guess, 1), guess);
    if (amax >= kInfinity) {  // finite / Inf is a signed zero; Inf / Inf and all of a NaN's block are NaN
      scale_inv = __uint_as_float(amax == kInfinity ? kInfinity : kNan);
      divisor = 0;
      reciprocal = __uint_as_float(amax == kInfinity ? 0 : kNan);
    }
  }
};

// Four codes, the first in the lowest byte: rounded to nearest even, saturated at 448; NaN is 0x7f.
__device__ inline uint32_t encode_e4m3(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

// Eight neighbouring elements of a row, as they lie in memory.
template <Input kInput>
struct Eight {
  static constexpr int kElementBytes = kInput == Input::kFloat ? 4 : 2;
  static constexpr int kWords = 8 * kElementBytes / 4;
  uint32_t words[kWords];

  // Loads the elements of a row of `width` elements from `column` on. Past its end come its last ones again,
  // which change no largest magnitude. If kVectorized, width is a multiple of 8 and `row` of 16 B; else any.
  template <bool kVectorized>
  __device__ void load(const uint8_t* row, uint32_t column, uint32_t width) {
    if constexpr (kVectorized) {
      const uint4* source = reinterpret_cast<const uint4*>(row + min(column, width - 8) * kElementBytes);
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 four = source[i / 4];
        words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint8_t* source = row + min(column + i, width - 1) * kElementBytes;
        if constexpr (kInput == Input::kFloat) {
          words[i] = *reinterpret_cast<const uint32_t*>(source);
        } else {
          const uint32_t half = *reinterpret_cast<const uint16_t*>(source);
          words[i / 2] = i % 2 ? words[i / 2] | half << 16 : half;
        }
      }
    }
  }

  // Loads halves, vectorized, from a row that no other SM reads after this.
  __device__ void load_once(const uint8_t* row, uint32_t column) {
    static_assert(kWords == 4, "one load");
    const uint4 four = ::load_once(row + column * kElementBytes);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  }

  __device__ float operator[](int i) const {
    if constexpr (kInput == Input::kFloat) return __uint_as_float(words[i]);
    const uint32_t word = words[i / 2];
    if constexpr (kInput == Input::kBFloat16) return __uint_as_float(i % 2 ? word & 0xffff0000 : word << 16);
    return half_to_float(i % 2 ? word >> 16 : word);
  }

  // The larger magnitudes of two words, in each half where elements are halves; NaN is the largest.
  // Signs mean nothing: to clear them would cost an instruction each time.
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t c;
    if constexpr (kInput == Input::kBFloat16) {
      asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    } else if constexpr (kInput == Input::kHalf) {
      asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    } else {
      asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    }
    return c;
  }
  __device__ uint32_t largest() const {
    uint32_t word = words[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) word = larger(word, words[i]);
    return word;
  }

  // The FP32 bits of the largest magnitude in what `larger` or `largest` gave.
  __device__ static uint32_t amax(uint32_t word) {
    if constexpr (kInput == Input::kFloat) return word & kMagnitude;
    if constexpr (kInput == Input::kBFloat16) return max(word << 16 & kMagnitude, word & 0xffff0000 & kMagnitude);
    const float low = half_to_float(word), high = half_to_float(word >> 16);
    return max(__float_as_uint(low) & kMagnitude, __float_as_uint(high) & kMagnitude);
  }

  // The codes, the first in the lowest byte.
  __device__ uint2 e4m3(const Divider& scale) const {
    const auto four = [&](int i) {
      const Eight& x = *this;
      return encode_e4m3(scale.divide(x[i]), scale.divide(x[i + 1]), scale.divide(x[i + 2]), scale.divide(x[i + 3]));
    };
    return {four(0), four(4)};
  }

  // Writes codes into a row of `width` codes from `column`, which lies in it, on, and none past its end.
  // If kVectorized, width is a multiple of 8 and `row` of 8 B; else any.
  template <bool kVectorized>
  __device__ static void store(uint8_t* row, uint32_t column, uint32_t width, uint2 codes) {
    if constexpr (kVectorized) {
      *reinterpret_cast<uint2*>(row + column) = codes;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i < width) row[column + i] = (i < 4 ? codes.x : codes.y) >> i % 4 * 8;
      }
    }
  }
};
