#pragma once

#include "kernels/codecs/codec.h"

namespace kvlm::codecs {

/// Ternary digits, five to a byte, widened to 2 bits.
struct Trit5 {
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kTrit5, 128}}};
  static constexpr int kWidth = 2;
  static constexpr int kRowBytes = 26;
  static constexpr int kStride = 26;

#if defined(__CUDACC__)
  /// The five digits of every byte, 2 bits each.
  static __device__ uint16_t (&digits())[256] {
    __shared__ uint16_t table[256];
    return table;
  }
  /// To be called by all threads of a block, which then meet.
  static __device__ void prepare() {
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += static_cast<int>(blockDim.x)) {
      int codes = 0;
      for (int digit = 0, rest = i; digit < 5; ++digit, rest /= 3) codes |= rest % 3 << 2 * digit;
      digits()[i] = static_cast<uint16_t>(codes);
    }
  }
  static __device__ void quarter(const std::byte* row, int quarter, uint32_t (&to)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      to[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i] |= four(row, quarter, 4 * i + j) << 8 * j;
    }
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    const int channel = 32 * group + 4 * part;
    const std::byte* from = row + channel / 5;
    const int first = channel % 5;
    const uint32_t low = digits()[shared_at<uint8_t>(from)];
    // Four digits end in the byte where they begin if that is with its first or second.
    const uint32_t high = first < 2 ? 0u : digits()[shared_at<uint8_t>(from + 1)];
    return (low | high << 10) >> 2 * first & 0xffu;
  }
#endif
};

}  // namespace kvlm::codecs
