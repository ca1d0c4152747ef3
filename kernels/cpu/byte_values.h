#pragma once

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

// The CPU's implementation of kernels/byte_values.h, which has checked the arguments.
namespace kvlm::cpu {

void place_bytes(TensorView to, ConstTensorView from, ConstTensorView values, Stream& stream);

}  // namespace kvlm::cpu
