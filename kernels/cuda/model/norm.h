#pragma once

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"
#include "kernels/norm.h"

// The CUDA implementation of kernels/norm.h, which has checked the arguments.
namespace kvlm::cuda {

void rms_norm(TensorView y, ConstTensorView x, ConstTensorView weight, float eps, Stream& stream);

void layer_norm(TensorView y, ConstTensorView x, ConstTensorView weight, ConstTensorView bias,
                float eps, Stream& stream);

void add_norm(TensorView y, TensorView x, Residual residual, std::span<const Addend> addends,
              ConstTensorView weight, ConstTensorView bias, float eps, Stream& stream);

}  // namespace kvlm::cuda
