#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// 4 bits a channel.
struct Bits4 {
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kBits4, 128}}};
  static constexpr int kWidth = 4;
  static constexpr int kRowBytes = 64;
  static constexpr int kStride = 80;

#if defined(__CUDACC__)
  static __device__ void quarter(const std::byte* row, int quarter, uint32_t (&to)[kWidth]) {
    const auto x = shared_at<uint4>(row + 16 * quarter);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    return shared_at<uint16_t>(row + 16 * group + 2 * part);
  }
#endif
};

}  // namespace kvlm::codecs
