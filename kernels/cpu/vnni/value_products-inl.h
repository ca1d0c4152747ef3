// Products of weights with values. Sums of a few vectors of channels stay in registers over all
// rows of a tile, one per vector, query and byte of the weights. For one query a tile costs more
// than its products: then codes are unpacked from their rows in registers.
#pragma once

#include "kernels/cpu/vnni/bytes-inl.h"
#include "kernels/cpu/vnni/codes-inl.h"
#include "kernels/cpu/vnni/layout.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

/// sums += step * level sum.
HWY_INLINE void add_sums(const __m512i (&sum)[3], float step, float* sums) {
  const __m512 levels = from_bytes(sum[0], sum[1], sum[2]);
  _mm512_store_ps(sums, _mm512_fmadd_ps(levels, _mm512_set1_ps(step), _mm512_load_ps(sums)));
}

/// Adds the products of the rows of a tile for kVectors vectors of channels.
///   bytes  (kQueries, kValueRows) as of SplitWeights
///   step   (kQueries,)
///   sums   (kQueries, stride), added to
template <size_t kQueries, size_t kVectors>
HWY_NOINLINE void multiply_tile(const uint8_t* tile, size_t quads, const int32_t* bytes,
                                const float* step, float* sums, size_t stride) {
  __m512i sum[kQueries][kVectors][3];
  repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
    repeat<kVectors>([&](auto v) __attribute__((always_inline)) {
      sum[q][v][0] = sum[q][v][1] = sum[q][v][2] = _mm512_setzero_si512();
    });
  });
  do {
    __m512i code[kVectors];
    repeat<kVectors>([&](auto v) __attribute__((always_inline)) {
      code[v] = _mm512_load_si512(tile + v * kTileStride);
    });
    repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
      repeat<3>([&](auto l) __attribute__((always_inline)) {
        const __m512i b = _mm512_set1_epi32(bytes[q * kValueRows + l]);
        repeat<kVectors>([&](auto v) __attribute__((always_inline)) {
          sum[q][v][l] = add_products(sum[q][v][l], code[v], b);
        });
      });
    });
    tile += 64;
    bytes += 4;
  } while (--quads > 0);
  repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
    repeat<kVectors>([&](auto v) __attribute__((always_inline)) {
      add_sums(sum[q][v], step[q], sums + q * stride + 16 * v);
    });
  });
}

template <size_t kVectors>
void multiply_tile(size_t queries, const uint8_t* tile, size_t quads, const int32_t* bytes,
                   const float* step, float* sums, size_t stride) {
  switch (queries) {
    case 1:
      return multiply_tile<1, kVectors>(tile, quads, bytes, step, sums, stride);
    case 2:
      return multiply_tile<2, kVectors>(tile, quads, bytes, step, sums, stride);
    case 3:
      return multiply_tile<3, kVectors>(tile, quads, bytes, step, sums, stride);
    default:
      return multiply_tile<4, kVectors>(tile, quads, bytes, step, sums, stride);
  }
}

/// One query, without a tile: vectors of channels per pass, few enough to keep their indices in
/// registers.
inline constexpr size_t kRowVectors = 4;

struct RowsTask {
  const uint8_t* const* rows = nullptr;
  const uint8_t* ahead = nullptr;  // kBits / 2 lines per quad to prefetch
  size_t quads = 0;
  size_t offset = 0;                        // bytes of a row before
  size_t bytes = 0;                         // bytes of a row from there
  std::array<const int32_t*, 2> weights{};  // of every second vector
  std::array<float, 2> step{};              // of every second vector
  float* sums = nullptr;
};

/// Unpacks a row in slices of 16 bytes, each with as many whole vectors as fit.
///   kFirst  vectors to skip in the first slice
template <size_t kBits, size_t kFirst>
struct RowUnpack {
  static constexpr size_t kVectors = std::min(kRowVectors, slice_channels(kBits) / 16);  // a slice
  static constexpr size_t kSliceBytes = slice_channels(kBits) * kBits / 8;
  static constexpr size_t kSlices = kRowVectors / kVectors;

  HWY_INLINE explicit RowUnpack(size_t row_bytes) {
    repeat<kVectors>([&](auto i) __attribute__((always_inline)) {
      bytes[i] = kBits == 8 ? load(kByteInterleave.data())
                            : load(kInterleaves<kBits>[kFirst + i].bytes.data());
      shifts[i] = load(kInterleaves<kBits>[kFirst + i].shifts.data());
    });
    for (size_t i = 0; i < kSlices; ++i) there[i] = first_lanes(row_bytes - i * kSliceBytes);
  }

  /// Vector i of a slice of four rows.
  HWY_INLINE __m512i codes(__m512i slice, size_t i) const {
    const __m512i words = _mm512_permutexvar_epi8(bytes[i], slice);
    if constexpr (kBits == 8) return words;
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts[i], words), mask);
  }

  __m512i mask = _mm512_set1_epi8(static_cast<char>((1 << kBits) - 1));
  __m512i bytes[kVectors];
  __m512i shifts[kVectors];
  __mmask16 there[kSlices];  // bytes of a slice
};

template <size_t kBits, size_t kFirst>
HWY_NOINLINE void multiply_rows(const RowsTask& task) {
  using Unpack = RowUnpack<kBits, kFirst>;
  const Unpack unpack(task.bytes);
  const uint8_t* const* rows = task.rows;
  const uint8_t* ahead = task.ahead;
  const int32_t* weights[2] = {task.weights[0], task.weights[1]};
  const size_t offset = task.offset;
  size_t quads = task.quads;
  __m512i sum[kRowVectors][3];
  repeat<kRowVectors>([&](auto v) __attribute__((always_inline)) {
    sum[v][0] = sum[v][1] = sum[v][2] = _mm512_setzero_si512();
  });
  do {
    repeat<Unpack::kSlices>([&](auto slice) __attribute__((always_inline)) {
      const __m512i x =
          load_rows(unpack.there[slice], rows, 1, offset + slice * Unpack::kSliceBytes);
      repeat<Unpack::kVectors>([&](auto i) __attribute__((always_inline)) {
        constexpr size_t kVector = slice * Unpack::kVectors + i;
        const __m512i codes = unpack.codes(x, i);
        repeat<3>([&](auto l) __attribute__((always_inline)) {
          const __m512i b = _mm512_set1_epi32(weights[kVector / 2][l]);
          sum[kVector][l] = add_products(sum[kVector][l], codes, b);
        });
      });
    });
    for (size_t line = 0; 2 * line < kBits; ++line) prefetch(ahead + 64 * line);
    ahead += 32 * kBits;
    rows += 4;
    weights[0] += 4;
    weights[1] += 4;
  } while (--quads > 0);
  repeat<kRowVectors>([&](auto v) __attribute__((always_inline)) {
    add_sums(sum[v], task.step[v / 2], task.sums + 16 * v);
  });
}

inline void multiply_rows(const RowsTask& task, size_t bits, bool second_half) {
  switch (bits) {
    case 1:
      return second_half ? multiply_rows<1, 4>(task) : multiply_rows<1, 0>(task);
    case 2:
      return multiply_rows<2, 0>(task);
    case 3:
      return multiply_rows<3, 0>(task);
    case 4:
      return multiply_rows<4, 0>(task);
    default:
      return multiply_rows<8, 0>(task);
  }
}

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
