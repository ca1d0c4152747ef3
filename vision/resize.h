#pragma once

#include <cstdint>
#include <vector>

#include "vision/preprocess.h"

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

/// Weights from `input` samples to `output` samples for a filter other than kNearest. Private to
/// resize(), and in a header for its tests.
/// Source: Pillow's Resample.c and torch's UpSampleKernel.cpp, whose roundings it follows.
ResizeAxis make_resize_axis(int input, int output, Resample resample, ResizeBackend backend);

}  // namespace kvlm
