#pragma once

#include "kernels/codecs/bits.h"

namespace kvlm::codecs {

template <>
struct Code<CodeFormat::kTrit2b> : BitCode<2> {
  static constexpr int kMaxCode = 2;
  static constexpr CodeRule kRule = CodeRule::kTernary;
  static constexpr bool kZeroStored = false;
  static constexpr float kOffset = -1;
};

/// Ternary digits of 2 bits each, multiplied as they are stored.
template <int kDim_>
struct Trit2b : Bits2<kDim_> {
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kTrit2b, kDim_}}};
};

}  // namespace kvlm::codecs
