#pragma once

#include "kernels/base/device.h"
#include "kernels/blend_rows.h"

// The CUDA implementation of kernels/blend_rows.h, which has checked the arguments; a build without
// CUDA links no_cuda/blend_rows.cpp instead, which throws Error{kUnsupported}.
namespace kvlm::cuda {

void blend_rows(TensorView y, ConstTensorView x, const RowBlend& blend, Stream& stream);

}  // namespace kvlm::cuda
