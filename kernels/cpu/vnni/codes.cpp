#include <hwy/base.h>

#if HWY_ARCH_X86_64

#include <cstring>

#include "kernels/cpu/vnni/codes-inl.h"
#include "kernels/cpu/vnni/layout.h"

// Unpacks codes to bytes, for widths that tiles cannot read directly.

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

namespace {

template <class Code>
void unpack_bits(const uint8_t* const* rows, size_t count, size_t offset, size_t bytes,
                 size_t channels, uint8_t* out, size_t stride) {
  constexpr size_t kBits = Code::kBits;
  const __m512i index = load(kUnpack<kBits>.bytes.data());
  const __m512i shifts = load(kUnpack<kBits>.shifts.data());
  const __m512i mask = _mm512_set1_epi8(static_cast<char>((1 << kBits) - 1));
  for (size_t c = 0; c < channels; c += 64) {
    const size_t at = c / 8 * kBits;
    const __mmask64 some = first_bytes(std::min(bytes - at, 8 * kBits));
    for (size_t r = 0; r < count; ++r) {
      const __m512i x = _mm512_maskz_loadu_epi8(some, rows[r] + offset + at);
      const __m512i words = _mm512_permutexvar_epi8(index, x);
      const __m512i codes = _mm512_multishift_epi64_epi8(shifts, words);
      _mm512_storeu_si512(out + r * stride + c, integers_of<Code>(_mm512_and_si512(codes, mask)));
    }
  }
}

void unpack_trits(const uint8_t* const* rows, size_t count, size_t offset, size_t bytes,
                  size_t channels, uint8_t* out, size_t stride) {
  const __m512i mask = _mm512_set1_epi8(3);
  for (size_t r = 0; r < count; ++r) {
    for (size_t at = 0; at < bytes; at += 64) {
      const __m512i x = _mm512_maskz_loadu_epi8(first_bytes(bytes - at), rows[r] + offset + at);
      const __m512i four = look_up(kTritCodes[0], x);
      const __m512i fifth = look_up(kTritCodes[1], x);
      for (size_t vector = 0; vector < 5 && 5 * at + 64 * vector < channels; ++vector) {
        const Interleave& index = kTritUnpack[vector];
        const __m512i words = _mm512_permutex2var_epi8(four, load(index.bytes.data()), fifth);
        const __m512i codes = _mm512_multishift_epi64_epi8(load(index.shifts.data()), words);
        _mm512_storeu_si512(out + r * stride + 5 * at + 64 * vector, _mm512_and_si512(codes, mask));
      }
    }
  }
}

template <class Code>
void unpack(const uint8_t* const* rows, size_t count, size_t offset, size_t bytes, size_t channels,
            uint8_t* out, size_t stride) {
  if constexpr (Code::kBits == 8) {
    for (size_t r = 0; r < count; ++r) std::memcpy(out + r * stride, rows[r] + offset, bytes);
  } else if constexpr (Code::kBits > 0) {
    unpack_bits<Code>(rows, count, offset, bytes, channels, out, stride);
  } else if constexpr (kIsTrits<Code>) {
    unpack_trits(rows, count, offset, bytes, channels, out, stride);
  } else {
    for (size_t r = 0; r < count; ++r) {
      for (size_t c = 0; c < channels; ++c) {
        out[r * stride + c] = static_cast<uint8_t>(Code::at(rows[r] + offset, static_cast<int>(c)));
      }
    }
  }
}

}  // namespace

void unpack_codes(const uint8_t* const* rows, size_t count, size_t offset,
                  const PackedSection& stored, uint8_t* out, size_t stride) {
  const auto of_code = with_code(stored.code, [](auto code) { return &unpack<decltype(code)>; });
  of_code(rows, count, offset, stored.row_bytes(), static_cast<size_t>(stored.channels), out,
          stride);
}

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()

#endif
