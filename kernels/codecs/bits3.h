#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// 3 bits a channel, widened to 4.
template <int kDim_>
struct Bits3 {
  static constexpr int kDim = kDim_;
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kBits3, kDim}}};
  static constexpr int kWidth = 4;
  static constexpr int kRowBytes = kDim * 3 / 8;
  static constexpr int kStride = padded_stride(kRowBytes, kWidth);
  static constexpr int kWideStride = padded_stride(kDim * kWidth / 8, kWidth);

#if defined(__CUDACC__)
  using Quarter = uint32_t[kQuarterWords<kWidth, kDim>];

  /// 8 codes of 3 bits as 8 of 4.
  static __device__ uint32_t widen(uint32_t x) {
    x = (x & 0x00000fffu) | (x & 0x00fff000u) << 4;
    x = (x & 0x003f003fu) | (x & 0x0fc00fc0u) << 2;
    return (x & 0x07070707u) | (x & 0x38383838u) << 1;
  }
  static __device__ void quarter(const std::byte* row, int quarter, Quarter& to) {
    constexpr int kWords = kQuarterWords<3, kDim>;
    uint32_t words[kWords];
    load_quarter<3, kDim>(row, quarter, words);
#pragma unroll
    for (int i = 0; i < kQuarterWords<kWidth, kDim>; ++i) {
      const int first = 24 * i / 32;
      const uint32_t next = words[first + 1 < kWords ? first + 1 : first];
      to[i] = widen(__funnelshift_r(words[first], next, 24 * i % 32));
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

}  // namespace kvlm::codecs
