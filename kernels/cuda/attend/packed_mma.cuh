#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/device/matrix_units.cuh"

// Codes as operands of the tensor cores: a shift and a mask turn a pair of codes into two halves.
// With an exponent of zero, a code that starts at bit p of the mantissa is the subnormal number
// code * 2^(p - 24). The tensor cores align products by the exponents of their operands, so a code
// is as high in the mantissa as possible; else sums lose digits. A single bit may be in the
// exponent too, as another power of two. The powers are folded into the other operand.
namespace kvlm::cuda {

/// Codes of kBits in a 32-bit word: pair i is code i of each 16 bits. Codes of 16 bits are halves
/// already.
template <int kBits>
struct CodePairs {
  static constexpr int kPairs = 16 / kBits;  // in a word
  /// Pairs that share a shift. Pairs i and i + kTogether have the same power of two.
  static constexpr int kTogether = kBits == 1 ? 6 : kBits == 2 ? 2 : 1;
  static constexpr int kLowest = kBits == 1 ? 8 : kBits == 8 ? 2 : 6;  // bit of the first of them
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  /// The largest and smallest exponent().
  static constexpr int kTop = kBits == 16 ? 0 : kBits == 1 ? -7 : kBits == 2 ? -16 : kLowest - 24;
  static constexpr int kBottom = kBits == 16 ? 0 : kLowest - 24;

  /// halves() of pair i are its codes times 2^exponent(i).
  static constexpr __device__ int exponent(int i) {
    if (kBits == 16) return 0;
    const int bit = kLowest + i % kTogether * kBits;
    return bit <= 10 ? bit - 24 : bit == 11 ? -13 : bit == 12 ? -11 : -7;
  }
  static __device__ uint32_t halves(uint32_t word, int i) {
    if constexpr (kBits == 16) return word;
    const int left = kLowest - i / kTogether * kTogether * kBits;
    const uint32_t moved = left >= 0 ? word << left : word >> -left;
    const int bit = kLowest + i % kTogether * kBits;
    return moved & (kMask << bit | kMask << (bit + 16));
  }
};

__device__ inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

/// The high halves of two numbers, or (`lower`) their low halves, for the remainder. Truncated, not
/// rounded, so that the threads of both agree.
__device__ inline uint32_t half_parts(float x, float y, bool lower) {
  const uint32_t higher = lower ? 0xffffe000u : 0u;
  x -= __uint_as_float(__float_as_uint(x) & higher);
  y -= __uint_as_float(__float_as_uint(y) & higher);
  uint32_t pair;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

/// Scale of a query: the power of two, from 2^-60 to 2^60, that brings `most` just below 2^15, and
/// its inverse.
struct Raise {
  float up;
  float down;
};

__device__ inline Raise raise_of(float most) {
  int exponent = 14 - (static_cast<int>(__float_as_uint(most) >> 23) - 127);
  exponent = max(-60, min(60, exponent));
  return {power_of_two(exponent), power_of_two(-exponent)};
}

}  // namespace kvlm::cuda
