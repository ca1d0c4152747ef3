#pragma once

#include <span>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

// The CUDA implementation of kernels/rope.h, which has checked the arguments.
namespace kvlm::cuda {

void rotate(std::span<const TensorView> xs, ConstTensorView cos, ConstTensorView sin,
            Stream& stream);

}  // namespace kvlm::cuda
