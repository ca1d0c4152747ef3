#pragma once

#include "vision/preprocess.h"
#include "vision/resize_passes.h"

namespace kvlm {

/// Weights from `input` samples to `output` samples for a filter other than kNearest. Private to
/// resize(), and in a header for its tests.
/// Source: Pillow's Resample.c and torch's UpSampleKernel.cpp, whose roundings it follows.
ResizeAxis make_resize_axis(int input, int output, Resample resample, ResizeBackend backend);

}  // namespace kvlm
