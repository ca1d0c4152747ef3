#pragma once

#include "kernels/base/tensor.h"
#include "vision/image.h"
#include "vision/normalization.h"

namespace kvlm {

/// (3, height, width) f32, as image processors hand it to towers: what patches are cut from.
inline Tensor normalize(const Image& image, const PreprocessSpec& spec) {
  const NormalizationTable table = normalization_table(spec);
  Tensor out(DType::kF32, {3, image.height, image.width});
  const auto pixels = static_cast<size_t>(image.height) * static_cast<size_t>(image.width);
  float* to = out.as<float>();
  for (size_t channel = 0; channel < 3; ++channel) {
    for (size_t i = 0; i < pixels; ++i) *to++ = table[channel][image.rgb[3 * i + channel]];
  }
  return out;
}

}  // namespace kvlm
