// Tables and instructions to unpack codes. Codes of one to eight bits may straddle bytes, so
// unpacking takes a permutation, which makes the bytes of a code adjacent, a multishift, which
// extracts eight bits from each code on, and a mask. Trits are packed five to a byte, base 3: a
// table converts a byte to four 2-bit codes and a fifth, which are then unpacked in the same way.
#pragma once

#include <algorithm>

#include "kernels/cpu/vnni/vectors-inl.h"
#include "kernels/packed_format.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

/// Channels of values that 16 bytes of a row hold, in whole vectors of 16.
constexpr size_t slice_channels(size_t bits) { return 128 / bits / 16 * 16; }

/// From 16 bytes each of four rows to the codes of 16 channels, a dword each, byte r of row r:
/// `bytes` gathers two bytes of every row per two channels, `shifts` extracts eight bits from each
/// code on.
struct Interleave {
  Bytes64 bytes;
  Bytes64 shifts;
};
template <size_t kBits>
constexpr std::array<Interleave, 8> interleaves() {
  std::array<Interleave, 8> table{};
  for (size_t vector = 0; vector < slice_channels(kBits) / 16; ++vector) {
    for (size_t pair = 0; pair < 8; ++pair) {
      const size_t bit = kBits * (16 * vector + 2 * pair);
      for (size_t row = 0; row < 4; ++row) {
        for (size_t i = 0; i < 2; ++i) {
          // No code needs a byte after the row's 16.
          const size_t byte = std::min<size_t>(bit / 8 + i, 15);
          table[vector].bytes[8 * pair + 2 * row + i] = static_cast<uint8_t>(16 * row + byte);
          table[vector].shifts[8 * pair + 4 * i + row] =
              static_cast<uint8_t>(16 * row + bit % 8 + kBits * i);
        }
      }
    }
  }
  return table;
}

template <size_t kBits>
inline constexpr std::array<Interleave, 8> kInterleaves = interleaves<kBits>();

/// As Interleave, of bytes: one index.
inline constexpr Bytes64 kByteInterleave = [] {
  Bytes64 index{};
  for (size_t i = 0; i < 64; ++i) index[i] = static_cast<uint8_t>(16 * (i % 4) + i / 4);
  return index;
}();

/// 64 codes of a row to a byte each; eight codes fill kBits bytes.
template <size_t kBits>
constexpr Interleave unpack_index() {
  Interleave table{};
  for (size_t i = 0; i < 64; ++i) {
    table.bytes[i] = static_cast<uint8_t>(std::min<size_t>(i / 8 * kBits + i % 8, 63));
    table.shifts[i] = static_cast<uint8_t>(kBits * (i % 8));
  }
  return table;
}

template <size_t kBits>
inline constexpr Interleave kUnpack = unpack_index<kBits>();

/// The digits of a kTrit5 byte: the first four as 2-bit codes, and the fifth.
inline constexpr std::array<std::array<uint8_t, 256>, 2> kTritCodes = [] {
  std::array<std::array<uint8_t, 256>, 2> table{};
  for (size_t byte = 0; byte < 256; ++byte) {
    for (size_t digit = 0, rest = byte; digit < 5; ++digit, rest /= 3) {
      auto& to = table[digit / 4][byte];
      to = static_cast<uint8_t>(to | (rest % 3) << (2 * (digit % 4)));
    }
  }
  return table;
}();

/// From the two vectors of kTritCodes to five vectors of 64 digits: in order, or such that
/// interleaving the bytes of four rows, within 16 bytes, gives 16 channels in order.
template <bool kInOrder>
constexpr std::array<Interleave, 5> trit_index() {
  std::array<Interleave, 5> table{};
  for (size_t vector = 0; vector < 5; ++vector) {
    for (size_t i = 0; i < 64; ++i) {
      const size_t digit = 64 * vector + (kInOrder ? i : i % 16 / 4 * 16 + i / 16 * 4 + i % 4);
      const bool fifth = digit % 5 == 4;
      table[vector].bytes[i] = static_cast<uint8_t>(digit / 5 + (fifth ? 64 : 0));
      table[vector].shifts[i] = static_cast<uint8_t>(8 * (i % 8) + (fifth ? 0 : 2 * (digit % 5)));
    }
  }
  return table;
}
inline constexpr std::array<Interleave, 5> kTritUnpack = trit_index<true>();
inline constexpr std::array<Interleave, 5> kTritInterleave = trit_index<false>();

HWY_INLINE __m512i look_up(const std::array<uint8_t, 256>& table, __m512i x) {
  const __m512i low = _mm512_permutex2var_epi8(load(table.data()), x, load(table.data() + 64));
  const __m512i high =
      _mm512_permutex2var_epi8(load(table.data() + 128), x, load(table.data() + 192));
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high);
}

/// The integers of codes, a byte each.
template <class Code>
HWY_INLINE __m512i integers_of(__m512i codes) {
  if constexpr (codecs::Codebook<Code>) {
    const __m512i table = _mm512_broadcast_i32x4(load16(Code::kIntegers.data()));
    return _mm512_shuffle_epi8(table, codes);
  }
  return codes;
}

/// Unpacks a section of rows to integers, a byte each, rows `stride` apart. Writes up to 63 bytes
/// after a row's codes.
///   rows    (count,) packed rows, in which the section begins at byte `offset`
void unpack_codes(const uint8_t* const* rows, size_t count, size_t offset,
                  const PackedSection& stored, uint8_t* out, size_t stride);

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
