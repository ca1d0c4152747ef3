// A tile of keys and its products with queries. A SIMD lane is a row: the tile is the transpose of
// 32 packed rows, column c being dword c of every row. A dword holds four bytes of `kPerByte`
// codes; an affine instruction shifts and masks each byte to every kPerByte-th code, four channels
// of the row. They are multiplied with the same four channels of the query, broadcast to all lanes.
// So a lane's sum is its row's score, and nothing is added across lanes.
#pragma once

#include "kernels/cpu/vnni/bytes-inl.h"
#include "kernels/cpu/vnni/codes-inl.h"
#include "kernels/cpu/vnni/layout.h"
#include "kernels/cpu/vnni/vectors-inl.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

/// Matrix of GF2P8AFFINEQB that shifts a byte right and keeps `bits` bits.
constexpr uint64_t extract_matrix(size_t shift, size_t bits) {
  uint64_t matrix = 0;
  for (size_t i = 0; i < bits; ++i) matrix |= uint64_t{1} << (8 * (7 - i) + i + shift);
  return matrix;
}

/// Stores dword i of 16 rows as `out[i * kKeyRows]`, eight dwords. Row r and row r + 4 are the
/// halves of x[r % 4 + r / 8 * 4].
HWY_INLINE void store_eight_columns(const __m512i (&x)[8], uint32_t* out) {
  __m512i y[2][4];  // of rows 0 to 7 and 8 to 15: dwords i of four rows, and i + 4
  HWY_UNROLL(2)
  for (size_t i = 0; i < 2; ++i) {
    const __m512i a = _mm512_unpacklo_epi32(x[4 * i], x[4 * i + 1]);
    const __m512i b = _mm512_unpacklo_epi32(x[4 * i + 2], x[4 * i + 3]);
    const __m512i c = _mm512_unpackhi_epi32(x[4 * i], x[4 * i + 1]);
    const __m512i d = _mm512_unpackhi_epi32(x[4 * i + 2], x[4 * i + 3]);
    y[i][0] = _mm512_unpacklo_epi64(a, b);
    y[i][1] = _mm512_unpackhi_epi64(a, b);
    y[i][2] = _mm512_unpacklo_epi64(c, d);
    y[i][3] = _mm512_unpackhi_epi64(c, d);
  }
  HWY_UNROLL(4)
  for (size_t i = 0; i < 4; ++i) {
    _mm512_store_si512(out + i * kKeyRows, _mm512_shuffle_i32x4(y[0][i], y[1][i], 0x88));
    _mm512_store_si512(out + (i + 4) * kKeyRows, _mm512_shuffle_i32x4(y[0][i], y[1][i], 0xdd));
  }
}

HWY_INLINE __m256i load32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

/// Transposes the dwords of 32 rows: columns[c * 32 + r] = dword c of row r. kReadable: whole
/// dwords after a row may be read.
template <bool kReadable>
void load_columns(const uint8_t* const* rows, size_t offset, size_t bytes, uint32_t* columns) {
  for (size_t half = 0; half < 2; ++half, rows += 16, columns += 16) {
    uint32_t* out = columns;
    size_t at = 0;
    for (; at + 32 <= bytes; at += 32, out += 8 * kKeyRows) {
      __m512i x[8];
      HWY_UNROLL(8)
      for (size_t i = 0; i < 8; ++i) {
        const size_t r = i % 4 + i / 4 * 8;
        x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load32(rows[r] + offset + at)),
                                  load32(rows[r + 4] + offset + at), 1);
      }
      store_eight_columns(x, out);
    }
    for (; at < bytes; at += 16, out += 4 * kKeyRows) {
      __m512i x[4];
      const size_t n = bytes - at;
      if (kReadable || n >= 16) {
        HWY_UNROLL(4)
        for (size_t i = 0; i < 4; ++i) x[i] = load_rows(rows + i, 4, offset + at);
      } else {
        const auto mask = static_cast<__mmask16>((1u << n) - 1);
        HWY_UNROLL(4)
        for (size_t i = 0; i < 4; ++i) x[i] = load_rows(mask, rows + i, 4, offset + at);
      }
      const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]);
      const __m512i b = _mm512_unpacklo_epi32(x[2], x[3]);
      _mm512_store_si512(out, _mm512_unpacklo_epi64(a, b));
      if (n <= 4) break;
      _mm512_store_si512(out + kKeyRows, _mm512_unpackhi_epi64(a, b));
      if (n <= 8) break;
      const __m512i c = _mm512_unpackhi_epi32(x[0], x[1]);
      const __m512i d = _mm512_unpackhi_epi32(x[2], x[3]);
      _mm512_store_si512(out + 2 * kKeyRows, _mm512_unpacklo_epi64(c, d));
      if (n <= 12) break;
      _mm512_store_si512(out + 3 * kKeyRows, _mm512_unpackhi_epi64(c, d));
    }
  }
}

/// Converts columns of five-trit bytes, in place, to two each: four 2-bit codes, then the fifth.
/// Backwards, since the output is twice as long.
HWY_INLINE void split_trits(size_t count, uint32_t* columns) {
  for (size_t c = count; c-- > 0;) {
    for (size_t half = 2; half-- > 0;) {
      const __m512i x = _mm512_load_si512(columns + c * kKeyRows + 16 * half);
      uint32_t* to = columns + c * 2 * kKeyRows + 16 * half;
      // With c = 0 the second half overwrites nothing that is still needed.
      _mm512_store_si512(to + kKeyRows, look_up(kTritCodes[1], x));
      _mm512_store_si512(to, look_up(kTritCodes[0], x));
    }
  }
}

/// Columns of a tile times queries.
struct DotTask {
  const uint32_t* columns = nullptr;  // five per byte: the first four digits, then the fifth
  size_t count = 0;
  const int32_t* bytes = nullptr;  // of the folded query: four dwords per quad
  const float* step = nullptr;     // (queries,): value of one level
  const uint8_t* ahead = nullptr;  // two lines per column to prefetch
  // Per token:
  const float* scales = nullptr;   // (32,)
  const float* zeros = nullptr;    // (32,)
  const float* offsets = nullptr;  // (queries,) sum of the group's folded query
  float* sums = nullptr;           // (queries, 32), added to
};

/// Sums of products per query, vector of 16 rows and byte of the query.
template <size_t kQueries>
using DotSums = __m512i[kQueries][2][3];

/// Adds the products of all columns.
template <size_t kQueries, size_t kPerByte>
HWY_INLINE void add_columns(const DotTask& task, DotSums<kQueries>& sum) {
  constexpr size_t kBits = kPerByte == 5 ? 2 : 8 / kPerByte;
  const uint32_t* x = task.columns;
  const int32_t* w = task.bytes;
  const uint8_t* ahead = task.ahead;
  size_t count = task.count;
  do {
    prefetch(ahead);
    prefetch(ahead + 64);
    ahead += 128;
    repeat<kPerByte>([&](auto k) __attribute__((always_inline)) {
      constexpr size_t kAt = k < 4 || kPerByte == 8 ? 0 : kKeyRows;
      __m512i low = _mm512_load_si512(x + kAt);
      __m512i high = _mm512_load_si512(x + kAt + 16);
      if constexpr (kPerByte > 1 && kAt == 0) {
        const __m512i matrix =
            _mm512_set1_epi64(static_cast<int64_t>(extract_matrix(kBits * k, kBits)));
        low = _mm512_gf2p8affine_epi64_epi8(low, matrix, 0);
        high = _mm512_gf2p8affine_epi64_epi8(high, matrix, 0);
      }
      repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
        repeat<3>([&](auto l) __attribute__((always_inline)) {
          const __m512i b = _mm512_set1_epi32(w[q * kByteStride + 4 * k + l]);
          sum[q][0][l] = add_products(sum[q][0][l], low, b);
          sum[q][1][l] = add_products(sum[q][1][l], high, b);
        });
      });
    });
    x += kPerByte == 5 ? 2 * kKeyRows : kKeyRows;
    w += 4 * kPerByte;
  } while (--count > 0);
}

template <size_t kQueries, size_t kPerByte, bool kToken>
HWY_NOINLINE void dot(const DotTask& task) {
  DotSums<kQueries> sum;
  repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
    repeat<3>([&](auto l) __attribute__((always_inline)) {
      sum[q][0][l] = sum[q][1][l] = _mm512_setzero_si512();
    });
  });
  add_columns<kQueries, kPerByte>(task, sum);
  repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
    repeat<2>([&](auto half) __attribute__((always_inline)) {
      float* to = task.sums + q * kKeyRows + 16 * half;
      __m512 factor = _mm512_set1_ps(task.step[q]);
      __m512 so_far = _mm512_load_ps(to);
      if constexpr (kToken) {
        factor = _mm512_mul_ps(factor, _mm512_load_ps(task.scales + 16 * half));
        so_far = _mm512_fmadd_ps(_mm512_load_ps(task.zeros + 16 * half),
                                 _mm512_set1_ps(task.offsets[q]), so_far);
      }
      const __m512i(&s)[3] = sum[q][half];
      _mm512_store_ps(to, _mm512_fmadd_ps(from_bytes(s[0], s[1], s[2]), factor, so_far));
    });
  });
}

template <size_t kPerByte, bool kToken>
void dot_queries(const DotTask& task, size_t queries) {
  switch (queries) {
    case 1:
      return dot<1, kPerByte, kToken>(task);
    case 2:
      return dot<2, kPerByte, kToken>(task);
    case 3:
      return dot<3, kPerByte, kToken>(task);
    default:
      return dot<4, kPerByte, kToken>(task);
  }
}

template <bool kToken>
void dot_any(const DotTask& task, size_t queries, size_t codes_per_byte) {
  switch (codes_per_byte) {
    case 1:
      return dot_queries<1, kToken>(task, queries);
    case 2:
      return dot_queries<2, kToken>(task, queries);
    case 4:
      return dot_queries<4, kToken>(task, queries);
    case 8:
      return dot_queries<8, kToken>(task, queries);
    default:
      if constexpr (!kToken) return dot_queries<5, false>(task, queries);
  }
}

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
