#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// 8 bits a channel.
struct Bits8 {
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kBits8, 128}}};
  static constexpr int kWidth = 8;
  static constexpr int kRowBytes = 128;
  static constexpr int kStride = 160;

#if defined(__CUDACC__)
  static __device__ void quarter(const std::byte* row, int quarter, uint32_t (&to)[kWidth]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto x = shared_at<uint4>(row + 32 * quarter + 16 * i);
      to[4 * i] = x.x, to[4 * i + 1] = x.y, to[4 * i + 2] = x.z, to[4 * i + 3] = x.w;
    }
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    return shared_at<uint32_t>(row + 32 * group + 4 * part);
  }
#endif
};

}  // namespace kvlm::codecs
