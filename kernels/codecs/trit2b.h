#pragma once

#include "kernels/codecs/bits.h"

namespace kvlm::codecs {

/// Ternary digits of 2 bits each, multiplied as they are stored.
template <int kDim_>
struct Trit2b : Bits2<kDim_> {
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kTrit2b, kDim_}}};
};

}  // namespace kvlm::codecs
