// Matrices in the order in which tiles are loaded, split into bf16 parts. Sizes are padded with
// zeros to whole steps of channels; rows beyond the last are not loaded.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/amx/target.h"

KVLM_BEFORE_AMX()
namespace kvlm::cpu::amx {

inline constexpr size_t kTileRows = 16;  // of x or y, and outputs of a tile of weights
inline constexpr size_t kStep = 32;      // channels of a tile
inline constexpr size_t kTile = kTileRows * kStep;

/// The upper or the lower half of 32 bf16 as floats.
template <int kHalf>
HWY_INLINE __m512 widen(__m512i bits) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bits, kHalf));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/// 32 floats rounded to bf16; they become what is left of them.
HWY_INLINE __m512i take_part(__m512& low, __m512& high) {
  const auto part = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  low = _mm512_sub_ps(low, widen<0>(part));
  high = _mm512_sub_ps(high, widen<1>(part));
  return part;
}

/// Which of 32 bf16 are infinite or not a number.
HWY_INLINE __mmask32 not_finite(__m512i bits) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, exponent), exponent);
}

HWY_INLINE __mmask32 first_channels(size_t n) {
  return n >= kStep ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
}

/// A row of x to row 0 of its tiles, [steps][kParts][2][kTile]. False if a part is not finite.
template <size_t kParts>
bool pack_row(const float* x, size_t in, uint16_t* to) {
  __mmask32 bad = 0;
  for (size_t i = 0; i < in; i += kStep, to += kParts * 2 * kTile) {
    const __mmask32 mask = first_channels(in - i);
    __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x + i);
    __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + i + 16);
    for (size_t p = 0; p < kParts; ++p) {
      const __m512i part = take_part(low, high);
      if (p == 0) bad |= not_finite(part);
      _mm512_store_si512(to + p * 2 * kTile, part);
    }
  }
  return bad == 0;
}

/// Part `part` of 32 weights.
template <bool kF16>
HWY_INLINE __m512i load_weights(const uint16_t* w, __mmask32 mask, size_t part) {
  const __m512i bits = _mm512_maskz_loadu_epi16(mask, w);
  if constexpr (!kF16) return bits;
  __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
  __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
  const __m512i first = take_part(low, high);
  return part == 0 ? first : take_part(low, high);
}

/// Transposes 16 rows of 16 pairs.
HWY_INLINE void transpose_pairs(const __m512i (&rows)[16], uint16_t* to) {
  __m512i a[16];
  __m512i b[16];
  for (size_t i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (size_t i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (size_t i = 0; i < 4; ++i) {
    const __m512i even_top = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    const __m512i even_bottom = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    const __m512i odd_top = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    const __m512i odd_bottom = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    uint16_t* pair = to + i * kStep;
    _mm512_store_si512(pair, _mm512_shuffle_i32x4(even_top, even_bottom, 0x88));
    _mm512_store_si512(pair + 4 * kStep, _mm512_shuffle_i32x4(odd_top, odd_bottom, 0x88));
    _mm512_store_si512(pair + 8 * kStep, _mm512_shuffle_i32x4(even_top, even_bottom, 0xdd));
    _mm512_store_si512(pair + 12 * kStep, _mm512_shuffle_i32x4(odd_top, odd_bottom, 0xdd));
  }
}

/// `depth` channels of up to 16 outputs, `in` apart, to half of a panel, [steps][kParts][2][kTile],
/// whose tiles hold [16 pairs of channels][16 outputs][2]. False if a weight is not finite.
template <size_t kParts, bool kF16>
bool pack_outputs(const uint16_t* w, size_t in, size_t outs, size_t depth, uint16_t* to) {
  __mmask32 bad = 0;
  for (size_t i = 0; i < depth; i += kStep) {
    const __mmask32 mask = first_channels(depth - i);
    for (size_t p = 0; p < kParts; ++p, to += 2 * kTile) {
      __m512i rows[kTileRows];
      for (size_t o = 0; o < kTileRows; ++o) {
        rows[o] = o < outs ? load_weights<kF16>(w + o * in + i, mask, p) : _mm512_setzero_si512();
        if (p == 0) bad |= not_finite(rows[o]);
      }
      transpose_pairs(rows, to);
    }
  }
  return bad == 0;
}

}  // namespace kvlm::cpu::amx
KVLM_AFTER_AMX()
