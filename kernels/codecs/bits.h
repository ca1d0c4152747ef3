#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

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
