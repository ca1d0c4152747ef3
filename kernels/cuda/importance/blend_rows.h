#pragma once

#include "kernels/base/device.h"
#include "kernels/blend_rows.h"

// The CUDA implementation of kernels/blend_rows.h, which has checked the arguments.
namespace kvlm::cuda {

void blend_rows(TensorView y, ConstTensorView x, const RowBlend& blend, Stream& stream);

}  // namespace kvlm::cuda
