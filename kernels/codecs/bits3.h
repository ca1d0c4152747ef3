#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// 3 bits a channel, widened to 4.
struct Bits3 {
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kBits3, 128}}};
  static constexpr int kWidth = 4;
  static constexpr int kRowBytes = 48;
  static constexpr int kStride = 48;
  static constexpr int kWideStride = 80;

#if defined(__CUDACC__)
  /// 8 codes of 3 bits as 8 of 4.
  static __device__ uint32_t widen(uint32_t x) {
    x = (x & 0x00000fffu) | (x & 0x00fff000u) << 4;
    x = (x & 0x003f003fu) | (x & 0x0fc00fc0u) << 2;
    return (x & 0x07070707u) | (x & 0x38383838u) << 1;
  }
  static __device__ void quarter(const std::byte* row, int quarter, uint32_t (&to)[kWidth]) {
    uint32_t words[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) words[i] = shared_at<uint32_t>(row + 12 * quarter + 4 * i);
    to[0] = widen(words[0]);
    to[1] = widen(__funnelshift_r(words[0], words[1], 24));
    to[2] = widen(__funnelshift_r(words[1], words[2], 16));
    to[3] = widen(words[2] >> 8);
  }
  static __device__ void widen_row(const std::byte* row, std::byte* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[kWidth];
      quarter(row, i, words);
      put_shared(to + 16 * i, uint4{words[0], words[1], words[2], words[3]});
    }
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    return shared_at<uint16_t>(row + 16 * group + 2 * part);
  }
#endif
};

}  // namespace kvlm::codecs
