#pragma once

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

// The CUDA implementation of kernels/byte_values.h, which has checked the arguments.
namespace kvlm::cuda {

void place_bytes(TensorView to, ConstTensorView from, ConstTensorView values, Stream& stream);

}  // namespace kvlm::cuda
