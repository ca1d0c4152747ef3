#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// Codes of 1 to 8 bits: code i begins at bit kBits * i.
template <int kBits_>
struct BitCode {
  static constexpr int kBits = kBits_;
  static constexpr int kMaxCode = (1 << kBits) - 1;
  static constexpr int kUnitCodes = 8;
  static constexpr int kUnitBytes = kBits;
  static constexpr CodeRule kRule = CodeRule::kAffine;
  static constexpr bool kZeroStored = true;
  static constexpr float kSlope = 1;
  static constexpr float kOffset = 0;

  VLM_HD static constexpr void pack(uint8_t* to, const uint8_t* codes, int n) noexcept {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= static_cast<uint64_t>(i < n ? codes[i] : 0) << (i * kBits);
    for (int byte = 0; byte < kBits; ++byte) {
      if (byte * 8 < n * kBits) to[byte] = static_cast<uint8_t>(word >> byte * 8);
    }
  }
  VLM_HD static constexpr int at(const uint8_t* row, int i) noexcept {
    const int bit = i * kBits;
    int word = row[bit / 8];
    if (bit % 8 + kBits > 8) word |= row[bit / 8 + 1] << 8;
    return word >> bit % 8 & kMaxCode;
  }
};

template <CodeFormat kFormat>
requires(kFormat <= CodeFormat::kBits8) struct Code<kFormat> : BitCode<static_cast<int>(kFormat)> {
};

/// On tensor cores: 1, 2, 4 or 8 bits per channel as stored; 3 bits widened to 4; 5, 6 or 7 to 8.
template <int kBits, int kDim_>
struct Bits {
  static constexpr int kDim = kDim_;
  static constexpr std::array<Section, 1> kSections{{{static_cast<CodeFormat>(kBits), kDim}}};
  static constexpr int kWidth = kBits <= 2 ? kBits : kBits <= 4 ? 4 : 8;
  static constexpr int kRowBytes = kDim * kBits / 8;
  static constexpr int kStride = padded_stride(kRowBytes, kWidth);
  static constexpr int kWideStride = kBits == kWidth ? 0 : padded_stride(kDim * kWidth / 8, kWidth);

#if defined(__CUDACC__)
  static constexpr int kCodes = 32 / kWidth;  // of a widened word
  using Quarter = uint32_t[kQuarterWords<kWidth, kDim>];

  /// The lower half of every group of kGroup codes that lie kWidth bits apart.
  template <int kGroup>
  static constexpr uint32_t lower_halves() {
    uint32_t mask = 0;
    for (int bit = 0; bit < 32; bit += kGroup * kWidth) {
      mask |= ((1u << kGroup / 2 * kBits) - 1) << bit;
    }
    return mask;
  }
  /// Moves the upper half of every such group to its widened position.
  template <int kGroup>
  static __device__ uint32_t move_apart(uint32_t x) {
    constexpr uint32_t kLower = lower_halves<kGroup>();
    constexpr uint32_t kUpper = kLower << kGroup / 2 * kBits;
    return (x & kLower) | (x & kUpper) << kGroup / 2 * (kWidth - kBits);
  }
  static __device__ uint32_t widen(uint32_t x) {
    if constexpr (kCodes == 8) x = move_apart<8>(x);
    return move_apart<2>(move_apart<4>(x));
  }
  static __device__ void quarter(const std::byte* row, int quarter, Quarter& to) {
    if constexpr (kBits == kWidth) {
      load_quarter<kBits, kDim>(row, quarter, to);
    } else {
      constexpr int kWords = kQuarterWords<kBits, kDim>;
      uint32_t words[kWords];
      load_quarter<kBits, kDim>(row, quarter, words);
#pragma unroll
      for (int i = 0; i < kQuarterWords<kWidth, kDim>; ++i) {
        const int bit = kCodes * kBits * i;
        const uint32_t next = words[bit / 32 + 1 < kWords ? bit / 32 + 1 : bit / 32];
        to[i] = widen(__funnelshift_r(words[bit / 32], next, bit % 32));
      }
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
    return four_of<kWidth>(row, group, part);
  }
#endif
};

template <int kDim>
using Bits1 = Bits<1, kDim>;
template <int kDim>
using Bits2 = Bits<2, kDim>;
template <int kDim>
using Bits3 = Bits<3, kDim>;
template <int kDim>
using Bits4 = Bits<4, kDim>;
template <int kDim>
using Bits5 = Bits<5, kDim>;
template <int kDim>
using Bits6 = Bits<6, kDim>;
template <int kDim>
using Bits7 = Bits<7, kDim>;
template <int kDim>
using Bits8 = Bits<8, kDim>;

}  // namespace kvlm::codecs
