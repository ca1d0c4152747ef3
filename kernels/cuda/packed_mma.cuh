#pragma once

#include <cuda_fp16.h>

#include <cstdint>

// Codes as operands of the tensor cores. A pair of codes becomes a pair of halves with one logical
// operation and one subtraction: bits placed below the exponent of 1.0, then 1.0 taken away, give
// code * 2^(p - 10) for a code that starts at mantissa bit p. The power of two is folded into what
// the codes are multiplied with.
namespace kvlm::cuda {

/// d (16 x 8) += a (16 x 16) b (16 x 8), halves in, floats out.
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// How codes of kBits lie in a 32-bit word of two 16-bit halves: pair i is code i of each half.
template <int kBits>
struct CodePairs {
  static constexpr int kPairs = 16 / kBits;  // of a word
  /// Pairs that one shift brings below the exponent, from mantissa bit kFirst on.
  static constexpr int kFirst = kBits == 8 ? 2 : 4;
  static constexpr int kEach = (10 - kFirst) / kBits;
  static constexpr uint32_t kMask = (1u << kBits) - 1;

  /// The mantissa bit at which pair i starts.
  static constexpr __device__ int position(int i) { return kFirst + i % kEach * kBits; }
  /// What a product with pair i is to be multiplied with: a power of two.
  static constexpr __device__ float factor(int i) {
    return static_cast<float>(1 << (10 - position(i)));
  }
  /// Pair i as halves.
  static __device__ uint32_t halves(uint32_t word, int i) {
    const int shift = i / kEach * kEach * kBits - kFirst;  // of the pairs that go together
    const uint32_t moved = shift < 0 ? word << -shift : word >> shift;
    const uint32_t mask = kMask << position(i) | kMask << (position(i) + 16);
    const uint32_t raised = (moved & mask) | 0x3c003c00u;
    const __half2 one = __half2half2(__ushort_as_half(0x3c00));
    const __half2 value = __hsub2(*reinterpret_cast<const __half2*>(&raised), one);
    return *reinterpret_cast<const uint32_t*>(&value);
  }
};

/// x as the sum of two halves, of a pair of numbers.
struct SplitPair {
  uint32_t high;
  uint32_t low;
};

__device__ inline SplitPair split(float x, float y) {
  const __half2 high = __floats2half2_rn(x, y);
  const float2 back = __half22float2(high);
  const __half2 low = __floats2half2_rn(x - back.x, y - back.y);
  return {*reinterpret_cast<const uint32_t*>(&high), *reinterpret_cast<const uint32_t*>(&low)};
}

}  // namespace kvlm::cuda
