// Helpers for 512-bit vectors: loads of several rows into one vector, masks for the last vector of
// an array, and loops whose index is a constant.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cpu/vnni/target.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

using Bytes64 = std::array<uint8_t, 64>;

/// body(0), body(1), ... with constants, so that arrays of vectors stay in registers. With an
/// unrolled loop GCC does not always do that.
template <size_t kCount, class Body>
HWY_INLINE void repeat(const Body& body) {
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) __attribute__((always_inline)) {
    (body(std::integral_constant<size_t, kIndex>()), ...);
  }
  (std::make_index_sequence<kCount>());
}

HWY_INLINE __m512i load(const void* p) { return _mm512_loadu_si512(p); }

HWY_INLINE __mmask64 first_bytes(size_t n) {
  return n >= 64 ? ~__mmask64{0} : (__mmask64{1} << n) - 1;
}
HWY_INLINE __mmask16 first_lanes(size_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1);
}

HWY_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

/// Must be inlined: GCC drops calls of a function that only prefetches.
HWY_INLINE void prefetch_lines(const std::byte* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) {
    prefetch(from + at);
  }
}

HWY_INLINE __m512i side_by_side(__m128i a, __m128i b, __m128i c, __m128i d) {
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(c), d, 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

HWY_INLINE __m128i load16(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

/// 16 bytes of each of four rows, `stride` pointers apart; with a mask, those it selects.
HWY_INLINE __m512i load_rows(const uint8_t* const* rows, size_t stride, size_t at) {
  return side_by_side(load16(rows[0] + at), load16(rows[stride] + at),
                      load16(rows[2 * stride] + at), load16(rows[3 * stride] + at));
}
HWY_INLINE __m512i load_rows(__mmask16 mask, const uint8_t* const* rows, size_t stride, size_t at) {
  return side_by_side(_mm_maskz_loadu_epi8(mask, rows[0] + at),
                      _mm_maskz_loadu_epi8(mask, rows[stride] + at),
                      _mm_maskz_loadu_epi8(mask, rows[2 * stride] + at),
                      _mm_maskz_loadu_epi8(mask, rows[3 * stride] + at));
}

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
