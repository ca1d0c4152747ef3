#pragma once

#include "kernels/activation.h"
#include "kernels/base/device.h"

// The CUDA implementation of kernels/activation.h, which has checked the arguments; a build without
// CUDA links no_cuda/activation.cpp instead, which throws Error{kUnsupported}.
namespace kvlm::cuda {

void activate(TensorView y, ConstTensorView x, Activation activation, Stream& stream);

void activate_gate(TensorView y, ConstTensorView gate, ConstTensorView up, Activation activation,
                   Stream& stream);

}  // namespace kvlm::cuda
