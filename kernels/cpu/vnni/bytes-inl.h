// Floats as three signed bytes, so that products with codes are exact integers. An array is scaled
// so that its largest magnitude is kLevels, and rounded to whole levels. Adding kMagic leaves the
// level in the mantissa's low bits; subtracting a bias from each of its three bytes makes them
// signed: level = low + 256 middle + 65536 high. One instruction multiplies four such bytes with
// four codes and adds to a 32-bit sum. The float sum is the three sums, weighted like the bytes,
// times the step size.
#pragma once

#include "kernels/base/dtype.h"
#include "kernels/cpu/vnni/vectors-inl.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

/// Levels of the largest magnitude: with the bias of the three bytes they stay within the
/// mantissa's +-2^22.
inline constexpr float kLevels = 4161000;
/// 1.5 * 2^23 + 0x8080: added to a whole number below 2^22, it leaves the number in the low bits of
/// the float, its two lower bytes biased by 128 and the upper one by 64.
inline constexpr float kMagic = 12582912.0f + 0x8080;
inline constexpr int kMagicBytes = 0x4b408080;
/// A smaller maximum counts as zero, since its reciprocal would overflow.
inline constexpr float kTiny = 1e-30f;

/// Permutation from the bytes (b0, b1, b2, -) of 16 numbers, a dword each, to one dword per byte
/// and quad: dword 4 i + l holds byte l of the channels of quad i. A dword of a packed row has
/// kPerByte quads, each of every kPerByte-th code of its bytes. If kPerByte is 8, channels 16..31
/// come from a second vector, and the second index gives the other quads.
template <size_t kPerByte>
constexpr std::array<Bytes64, 2> quad_bytes() {
  std::array<Bytes64, 2> index{};
  for (size_t half = 0; half < 2; ++half) {
    for (size_t i = 0; i < 4; ++i) {
      for (size_t l = 0; l < 4; ++l) {
        for (size_t b = 0; b < 4; ++b) {
          size_t lane = 4 * i + b;
          if (kPerByte == 2) lane = 8 * (i / 2) + 2 * b + i % 2;
          if (kPerByte == 4) lane = 4 * b + i;
          if (kPerByte == 8) lane = 16 * (b / 2) + 8 * (b % 2) + 4 * half + i;
          index[half][16 * i + 4 * l + b] = static_cast<uint8_t>(4 * lane + l);
        }
      }
    }
  }
  return index;
}

/// The larger magnitude.
HWY_INLINE __m512 larger(__m512 a, __m512 b) { return _mm512_range_ps(a, b, 0b1011); }

/// factor * x, rounded, as three signed bytes in bytes 0 to 2 of every dword.
HWY_INLINE __m512i to_bytes(__m512 x, __m512 factor) {
  const __m512 rounded = _mm512_fmadd_ps(x, factor, _mm512_set1_ps(kMagic));
  return _mm512_sub_epi8(_mm512_castps_si512(rounded), _mm512_set1_epi32(kMagicBytes));
}

/// Adds to every SIMD lane the products of its four unsigned bytes of `codes` and signed `bytes`.
/// For the intrinsic, GCC 12 copies the sum before and stores it after every call.
HWY_INLINE __m512i add_products(__m512i sum, __m512i codes, __m512i bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(bytes));
  return sum;
}

/// The level sum, from the sums of products with each byte.
HWY_INLINE __m512 from_bytes(__m512i low, __m512i middle, __m512i high) {
  const __m512 sum =
      _mm512_fmadd_ps(_mm512_cvtepi32_ps(middle), _mm512_set1_ps(256), _mm512_cvtepi32_ps(low));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(65536), sum);
}

/// The largest lane of each of four vectors.
HWY_INLINE __m128 largest_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all =
      _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/// The sum of the lanes of each of four vectors.
HWY_INLINE __m128 sums_of_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all =
      _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/// From the maxima of four arrays: the value of one level (step), and its inverse (factor).
HWY_INLINE void set_step_sizes(__m128 most, float* step, float* factor) {
  const __m128 levels = _mm_set1_ps(kLevels);
  _mm_storeu_ps(step, _mm_div_ps(most, levels));
  const __mmask8 counts = _mm_cmp_ps_mask(most, _mm_set1_ps(kTiny), _CMP_GT_OQ);
  _mm_storeu_ps(factor, _mm_maskz_div_ps(counts, levels, most));
}

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
