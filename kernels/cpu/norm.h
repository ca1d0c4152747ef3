#pragma once

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

// The CPU's implementation of kernels/norm.h, which has checked the arguments.
namespace kvlm::cpu {

void rms_norm(TensorView y, ConstTensorView x, ConstTensorView weight, float eps, Stream& stream);

void layer_norm(TensorView y, ConstTensorView x, ConstTensorView weight, ConstTensorView bias,
                float eps, Stream& stream);

}  // namespace kvlm::cpu
