#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// 5 bits a channel, widened to 8.
template <int kDim_>
struct Bits5 {
  static constexpr int kDim = kDim_;
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kBits5, kDim}}};
  static constexpr int kWidth = 8;
  static constexpr int kRowBytes = kDim * 5 / 8;
  static constexpr int kStride = padded_stride(kRowBytes, kWidth);
  static constexpr int kWideStride = padded_stride(kDim * kWidth / 8, kWidth);

#if defined(__CUDACC__)
  using Quarter = uint32_t[kQuarterWords<kWidth, kDim>];

  /// 4 codes of 5 bits as 4 of 8.
  static __device__ uint32_t widen(uint32_t x) {
    x = (x & 0x000003ffu) | (x & 0x000ffc00u) << 6;
    return (x & 0x001f001fu) | (x & 0x03e003e0u) << 3;
  }
  static __device__ void quarter(const std::byte* row, int quarter, Quarter& to) {
    constexpr int kWords = kQuarterWords<5, kDim>;
    uint32_t words[kWords];
    load_quarter<5, kDim>(row, quarter, words);
#pragma unroll
    for (int i = 0; i < kQuarterWords<kWidth, kDim>; ++i) {
      const int first = 20 * i / 32;
      const uint32_t next = words[first + 1 < kWords ? first + 1 : first];
      to[i] = widen(__funnelshift_r(words[first], next, 20 * i % 32));
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
