#pragma once

#include <cstdint>
#include <vector>

#include "vision/image.h"

namespace kvlm {

/// The fixed-point weights of one axis of a resize: output i is
/// clamp((half + sum_t weights[i * max_taps + t] * input[first[i] + t]) >> shift), t < taps[i].
struct ResizeAxis {
  int shift = 0;
  int max_taps = 0;
  std::vector<int> first;
  std::vector<int> taps;
  std::vector<int32_t> weights;
};

/// The picture with every row, or every column, resampled by `axis`, whose input is as long.
/// Integer arithmetic: the same bytes on every processor. Private to resize().
Image resize_rows(const Image& in, const ResizeAxis& axis);
Image resize_columns(const Image& in, const ResizeAxis& axis);

}  // namespace kvlm
