#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// 64 channels of 2 bits, then 64 of 1 bit (VidKV's keys), widened to 2.
template <int kDim_>
struct Bits21 {
  static_assert(kDim_ == 128);
  static constexpr int kDim = kDim_;
  static constexpr std::array<Section, 2> kSections{
      {{CodeFormat::kBits2, 64}, {CodeFormat::kBits1, 64}}};
  static constexpr int kWidth = 2;
  static constexpr int kRowBytes = 24;
  static constexpr int kStride = 24;

#if defined(__CUDACC__)
  /// Widens 16 codes of 1 bit to 2 bits.
  static __device__ uint32_t widen(uint32_t x) {
    x = (x | x << 8) & 0x00ff00ffu;
    x = (x | x << 4) & 0x0f0f0f0fu;
    x = (x | x << 2) & 0x33333333u;
    return (x | x << 1) & 0x55555555u;
  }
  static __device__ void quarter(const std::byte* row, int quarter, uint32_t (&to)[kWidth]) {
    const bool narrow = quarter >= 2;
    const std::byte* from = row + (narrow ? 8 + 4 * quarter : 8 * quarter);
    const auto x = shared_at<uint32_t>(from);
    const auto y = shared_at<uint32_t>(narrow ? from : from + 4);
    to[0] = narrow ? widen(x & 0xffffu) : x;
    to[1] = narrow ? widen(x >> 16) : y;
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    if (group < 2) return shared_at<uint8_t>(row + 8 * group + part);
    const uint32_t x = shared_at<uint8_t>(row + 8 + 4 * group + part / 2);
    return widen(x >> part % 2 * 4 & 15);
  }
#endif
};

}  // namespace kvlm::codecs
