#pragma once

#include "kernels/codecs/bits.h"

namespace kvlm::codecs {

template <>
struct Code<CodeFormat::kTrit2b> : BitCode<2> {
  static constexpr int kMaxCode = 2;
  static constexpr CodeRule kRule = CodeRule::kTernary;
  static constexpr bool kZeroStored = false;
  static constexpr float kOffset = -1;
};

/// On tensor cores: ternary digits of 2 bits each, as stored.
template <int kDim_>
struct Trit2b : Bits2<kDim_> {
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kTrit2b, kDim_}}};
};

template <>
struct Code<CodeFormat::kTrit5> : Code<CodeFormat::kTrit2b> {  // the same values
  static constexpr int kBits = 0;
  static constexpr int kUnitCodes = 5;
  static constexpr int kUnitBytes = 1;

  VLM_HD static constexpr void pack(uint8_t* to, const uint8_t* codes, int n) noexcept {
    int value = 0;
    for (int i = 4; i >= 0; --i) value = value * 3 + (i < n ? codes[i] : 1);
    *to = static_cast<uint8_t>(value);
  }
  VLM_HD static constexpr int at(const uint8_t* row, int i) noexcept {
    constexpr int kPower[5] = {1, 3, 9, 27, 81};
    return row[i / 5] / kPower[i % 5] % 3;
  }
};

/// On tensor cores: ternary digits, five to a byte, widened to 2 bits.
template <int kDim_>
struct Trit5 {
  static_assert(kDim_ == 128);
  static constexpr int kDim = kDim_;
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kTrit5, 128}}};
  static constexpr int kWidth = 2;
  static constexpr int kRowBytes = 26;
  static constexpr int kStride = 26;
  static constexpr int kWideStride = 32;

#if defined(__CUDACC__)
  /// Table: the five digits of every byte, 2 bits each.
  static __device__ uint16_t (&digits())[256] {
    __shared__ uint16_t table[256];
    return table;
  }
  /// Fills the table, by all threads of a block; synchronise them afterwards.
  static __device__ void prepare() {
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += static_cast<int>(blockDim.x)) {
      int codes = 0;
      for (int digit = 0, rest = i; digit < 5; ++digit, rest /= 3) codes |= rest % 3 << 2 * digit;
      digits()[i] = static_cast<uint16_t>(codes);
    }
  }
  static __device__ void widen_row(const std::byte* row, std::byte* to) {
    uint64_t digits_of = 0;  // not yet in words
    int bits = 0;
    uint32_t words[8];
#pragma unroll
    for (int byte = 0; byte < kRowBytes; ++byte) {
      // Rows begin at even addresses.
      const uint32_t pair = shared_at<uint16_t>(row + byte / 2 * 2);
      digits_of |= static_cast<uint64_t>(digits()[pair >> byte % 2 * 8 & 255]) << bits;
      bits += 10;
      if (bits >= 32) {
        words[byte * 10 / 32] = static_cast<uint32_t>(digits_of);
        digits_of >>= 32;
        bits -= 32;
      }
    }
    put_shared(to, uint4{words[0], words[1], words[2], words[3]});
    put_shared(to + 16, uint4{words[4], words[5], words[6], words[7]});
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    return four_of<kWidth>(row, group, part);
  }
#endif
};

}  // namespace kvlm::codecs
