#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// 5 bits a channel, widened to 8.
struct Bits5 {
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kBits5, 128}}};
  static constexpr int kWidth = 8;
  static constexpr int kRowBytes = 80;
  static constexpr int kStride = 80;
  static constexpr int kWideStride = 160;

#if defined(__CUDACC__)
  /// 4 codes of 5 bits as 4 of 8.
  static __device__ uint32_t widen(uint32_t x) {
    x = (x & 0x000003ffu) | (x & 0x000ffc00u) << 6;
    return (x & 0x001f001fu) | (x & 0x03e003e0u) << 3;
  }
  static __device__ void quarter(const std::byte* row, int quarter, uint32_t (&to)[kWidth]) {
    uint32_t words[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shared_at<uint32_t>(row + 20 * quarter + 4 * i);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const int first = 20 * i / 32;
      to[i] = widen(__funnelshift_r(words[first], words[first < 4 ? first + 1 : 4], 20 * i % 32));
    }
  }
  static __device__ void widen_row(const std::byte* row, std::byte* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[kWidth];
      quarter(row, i, words);
      put_shared(to + 32 * i, uint4{words[0], words[1], words[2], words[3]});
      put_shared(to + 32 * i + 16, uint4{words[4], words[5], words[6], words[7]});
    }
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    return shared_at<uint32_t>(row + 32 * group + 4 * part);
  }
#endif
};

}  // namespace kvlm::codecs
