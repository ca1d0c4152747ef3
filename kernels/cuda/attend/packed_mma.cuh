#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/device/matrix_units.cuh"

// Codes as operands of the tensor cores. A shift and a mask make two halves of a pair of codes:
// bits left in the mantissa of a half, with an exponent of zero, are the subnormal number code *
// 2^(p - 24) for a code that starts at bit p. The tensor cores align products by the exponents of
// their operands, so a code stands as high in the mantissa as it can, else its sums lose digits; a
// single bit may stand in the exponent too, where it is another power of two. The powers of two are
// folded into what the codes are multiplied with.
namespace kvlm::cuda {

/// How codes of kBits lie in a 32-bit word of two 16-bit halves: pair i is code i of each half.
/// 16 bits are halves already.
template <int kBits>
struct CodePairs {
  static constexpr int kPairs = 16 / kBits;  // of a word
  /// Pairs that one shift brings where they are needed; pairs i and i + kTogether have the same
  /// power of two.
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

/// A pair of numbers as two halves each: the higher parts, or what those leave for the lower ones.
/// Cut, not rounded, so that the threads of both parts agree.
__device__ inline uint32_t half_parts(float x, float y, bool lower) {
  const uint32_t higher = lower ? 0xffffe000u : 0u;
  x -= __uint_as_float(__float_as_uint(x) & higher);
  y -= __uint_as_float(__float_as_uint(y) & higher);
  uint32_t pair;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

/// The power of two that brings `most` (a number from 2^-60 to 2^60, else the nearest) below 2^15,
/// and its inverse.
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
