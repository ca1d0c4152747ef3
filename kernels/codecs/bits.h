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

/// 1, 2, 4 or 8 bits a channel, multiplied as they are stored.
template <int kBits, int kDim_>
struct Bits {
  static constexpr int kDim = kDim_;
  static constexpr std::array<Section, 1> kSections{{{static_cast<CodeFormat>(kBits), kDim}}};
  static constexpr int kWidth = kBits;
  static constexpr int kRowBytes = kDim * kBits / 8;
  static constexpr int kStride = padded_stride(kRowBytes, kWidth);

#if defined(__CUDACC__)
  static __device__ void quarter(const std::byte* row, int quarter,
                                 uint32_t (&to)[kQuarterWords<kWidth, kDim>]) {
    load_quarter<kBits, kDim>(row, quarter, to);
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
using Bits4 = Bits<4, kDim>;
template <int kDim>
using Bits8 = Bits<8, kDim>;

}  // namespace kvlm::codecs
