#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// 2 bits a channel.
struct Bits2 {
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kBits2, 128}}};
  static constexpr int kWidth = 2;
  static constexpr int kRowBytes = 32;
  static constexpr int kStride = 32;

#if defined(__CUDACC__)
  static __device__ void quarter(const std::byte* row, int quarter, uint32_t (&to)[kWidth]) {
    const auto x = shared_at<uint2>(row + 8 * quarter);
    to[0] = x.x, to[1] = x.y;
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    return shared_at<uint8_t>(row + 8 * group + part);
  }
#endif
};

}  // namespace kvlm::codecs
