#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// 1 bit a channel.
struct Bits1 {
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kBits1, 128}}};
  static constexpr int kWidth = 1;
  static constexpr int kRowBytes = 16;
  static constexpr int kStride = 16;

#if defined(__CUDACC__)
  static __device__ void quarter(const std::byte* row, int quarter, uint32_t (&to)[kWidth]) {
    to[0] = shared_at<uint32_t>(row + 4 * quarter);
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    return static_cast<uint32_t>(shared_at<uint8_t>(row + 4 * group + part / 2)) >> part % 2 * 4;
  }
#endif
};

}  // namespace kvlm::codecs
