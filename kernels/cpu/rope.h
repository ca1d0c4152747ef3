#pragma once

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

// The CPU's implementation of kernels/rope.h, which has checked the arguments.
namespace kvlm::cpu {

void rotate(TensorView x, ConstTensorView cos, ConstTensorView sin, Stream& stream);

}  // namespace kvlm::cpu
