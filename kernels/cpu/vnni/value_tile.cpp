#include <hwy/base.h>

#if HWY_ARCH_X86_64

#include <algorithm>
#include <array>

#include "kernels/cpu/vnni/codes-inl.h"
#include "kernels/cpu/vnni/value_tile.h"

// Builds the tile from 16 bytes of each of four rows at a time: one permutation and one multishift
// extract 16 channels of the four rows to a vector of the tile. Codes of other widths are unpacked
// to bytes first.

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

namespace {

/// Four rows at a time from packed codes to the tile.
template <class Code>
HWY_NOINLINE void load_tile(const uint8_t* const* rows, size_t quads, size_t offset, size_t bytes,
                            size_t channels, const uint8_t* ahead, uint8_t* tile) {
  constexpr size_t kBits = Code::kBits;
  constexpr size_t kSlice = slice_channels(kBits);
  constexpr size_t kSliceBytes = kSlice * kBits / 8;
  const __m512i mask = _mm512_set1_epi8(static_cast<char>((1 << kBits) - 1));
  const size_t vectors = (channels + 15) / 16;
  for (size_t first = 0; first < vectors; first += kSlice / 16) {
    const size_t at = offset + first / (kSlice / 16) * kSliceBytes;
    const size_t n = offset + bytes - at;
    const auto some = static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1);
    const size_t count = std::min(kSlice / 16, vectors - first);
    uint8_t* out = tile + first * kTileStride;
    for (size_t quad = 0; quad < quads; ++quad, out += 64) {
      prefetch(ahead);
      ahead += 64;
      const __m512i x = load_rows(some, rows + 4 * quad, 1, at);
      HWY_UNROLL(8)
      for (size_t v = 0; v < kSlice / 16; ++v) {
        if (v >= count) break;
        __m512i codes;
        if constexpr (kBits == 8) {
          codes = _mm512_permutexvar_epi8(load(kByteInterleave.data()), x);
        } else {
          codes = _mm512_permutexvar_epi8(load(kInterleaves<kBits>[v].bytes.data()), x);
          codes = _mm512_multishift_epi64_epi8(load(kInterleaves<kBits>[v].shifts.data()), codes);
          codes = integers_of<Code>(_mm512_and_si512(codes, mask));
        }
        _mm512_store_si512(out + v * kTileStride, codes);
      }
    }
  }
}

/// As load_tile, of rows of at most 64 bytes of kTrit5.
HWY_NOINLINE void load_tile_of_trits(const uint8_t* const* rows, size_t quads, size_t offset,
                                     size_t bytes, size_t channels, const uint8_t* ahead,
                                     uint8_t* tile) {
  const __m512i mask = _mm512_set1_epi8(3);
  const __mmask64 some = first_bytes(bytes);
  for (size_t quad = 0; quad < quads; ++quad, tile += 64) {
    prefetch(ahead + quad * 4 * bytes);
    prefetch(ahead + quad * 4 * bytes + 64);
    __m512i four[4];
    __m512i fifth[4];
    HWY_UNROLL(4)
    for (size_t r = 0; r < 4; ++r) {
      const __m512i x = _mm512_maskz_loadu_epi8(some, rows[4 * quad + r] + offset);
      four[r] = look_up(kTritCodes[0], x);
      fifth[r] = look_up(kTritCodes[1], x);
    }
    for (size_t c = 0; c < channels; c += 64) {
      const Interleave& index = kTritInterleave[c / 64];
      const __m512i digits = load(index.bytes.data());
      const __m512i shifts = load(index.shifts.data());
      __m512i x[4];
      HWY_UNROLL(4)
      for (size_t r = 0; r < 4; ++r) {
        x[r] = _mm512_permutex2var_epi8(four[r], digits, fifth[r]);
        x[r] = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, x[r]), mask);
      }
      uint8_t* out = tile + c / 16 * kTileStride;
      const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]);
      const __m512i b = _mm512_unpacklo_epi8(x[2], x[3]);
      _mm512_store_si512(out, _mm512_unpacklo_epi16(a, b));
      if (c + 16 >= channels) break;
      _mm512_store_si512(out + kTileStride, _mm512_unpackhi_epi16(a, b));
      if (c + 32 >= channels) break;
      const __m512i d = _mm512_unpackhi_epi8(x[0], x[1]);
      const __m512i e = _mm512_unpackhi_epi8(x[2], x[3]);
      _mm512_store_si512(out + 2 * kTileStride, _mm512_unpacklo_epi16(d, e));
      if (c + 48 >= channels) break;
      _mm512_store_si512(out + 3 * kTileStride, _mm512_unpackhi_epi16(d, e));
    }
  }
}

/// Unpacks codes to bytes first.
void load_unpacked(const PaddedSection& section, const uint8_t* const* rows, size_t count,
                   const uint8_t* const* next, uint8_t* unpacked, uint8_t* tile) {
  std::array<const uint8_t*, kValueRows> codes;
  const size_t quads = (count + 3) / 4;
  const size_t row_bytes = section.width + kRowSlack;
  for (size_t r = 0; r < 4 * quads; ++r) {
    codes[r] = unpacked + std::min(r, count - 1) * row_bytes;
    prefetch(next[r] + section.row_offset);
  }
  unpack_codes(rows, count, section.row_offset, *section.stored, unpacked, row_bytes);
  const auto channels = static_cast<size_t>(section.stored->channels);
  load_tile<codecs::BitCode<8>>(codes.data(), quads, 0, round_up(channels, 16), channels, codes[0],
                                tile);
}

template <class Code>
void load_section(const PaddedSection& section, const uint8_t* const* rows, size_t count,
                  const uint8_t* const* next, uint8_t* unpacked, uint8_t* tile) {
  const PackedSection& stored = *section.stored;
  const size_t quads = (count + 3) / 4;
  const size_t offset = section.row_offset;
  const size_t bytes = stored.row_bytes();
  const auto channels = static_cast<size_t>(stored.channels);
  const uint8_t* ahead = next[0] + offset * 4 * quads;
  if constexpr (Code::kBits != 0 && Code::kBits != 7) {
    load_tile<Code>(rows, quads, offset, bytes, channels, ahead, tile);
  } else if (kIsTrits<Code> && bytes <= 64) {
    load_tile_of_trits(rows, quads, offset, bytes, channels, ahead, tile);
  } else {
    load_unpacked(section, rows, count, next, unpacked, tile);
  }
}

}  // namespace

void load_value_tile(const PaddedSection& section, const uint8_t* const* rows, size_t count,
                     const uint8_t* const* next, uint8_t* unpacked, uint8_t* tile) {
  const auto of_code =
      with_code(section.stored->code, [](auto code) { return &load_section<decltype(code)>; });
  of_code(section, rows, count, next, unpacked, tile);
}

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()

#endif
