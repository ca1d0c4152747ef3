#pragma once

#include "kernels/codecs/bits.h"

namespace kvlm::codecs {

/// A row of codes of a codebook of 3 or 4 bits on tensor cores, widened to the 8-bit integers.
template <CodeFormat kFormat, int kDim_>
struct CodebookRow {
  static constexpr int kDim = kDim_;
  static constexpr std::array<Section, 1> kSections{{{kFormat, kDim}}};
  static constexpr int kWidth = 8;
  static constexpr int kBits = Code<kFormat>::kBits;
  static_assert(kBits == 3 || kBits == 4);
  using Stored = Bits<kBits, kDim>;  // which widens codes to 4 bits
  static constexpr int kRowBytes = Stored::kRowBytes;
  static constexpr int kStride = padded_stride(kRowBytes, 4);
  static constexpr int kWideStride = kDim + 16;  // 8 tokens in different banks

#if defined(__CUDACC__)
  using Quarter = uint32_t[kQuarterWords<kWidth, kDim>];

  /// Integers 4 i to 4 i + 3 as a word.
  static constexpr uint32_t integers(int i) {
    uint32_t word = 0;
    for (int j = 3; j >= 0; --j) word = word << 8 | Code<kFormat>::kIntegers[4 * i + j];
    return word;
  }
  /// The integers of the four codes in the lower 16 bits, 4 bits each. Byte permutations look up
  /// both halves of the table by 3 bits; another one chooses by the fourth.
  static __device__ uint32_t widen(uint32_t codes) {
    constexpr uint32_t kTable[4] = {integers(0), integers(1), integers(2), integers(3)};
    if constexpr (kBits == 3) return __byte_perm(kTable[0], kTable[1], codes);
    const uint32_t of_eight = codes & 0x7777u;
    return __byte_perm(__byte_perm(kTable[0], kTable[1], of_eight),
                       __byte_perm(kTable[2], kTable[3], of_eight),
                       (codes & 0x8888u) >> 1 | 0x3210u);
  }
  static __device__ void quarter(const std::byte* row, int quarter, Quarter& to) {
    typename Stored::Quarter words;
    Stored::quarter(row, quarter, words);
#pragma unroll
    for (int i = 0; i < kQuarterWords<kWidth, kDim>; ++i) {
      to[i] = widen(words[i / 2] >> i % 2 * 16);
    }
  }
  static __device__ void widen_row(const std::byte* row, std::byte* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Quarter words;
      quarter(row, i, words);
      store_shared(to + sizeof words * i, words);
    }
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    static_assert(kBits == 4);
    return widen(shared_at<uint16_t>(row + 16 * group + 2 * part));
  }
#endif
};

}  // namespace kvlm::codecs
