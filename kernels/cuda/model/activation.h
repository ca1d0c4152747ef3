#pragma once

#include "kernels/activation.h"
#include "kernels/base/device.h"

// The CUDA implementation of kernels/activation.h, which has checked the arguments.
namespace kvlm::cuda {

void activate(TensorView y, ConstTensorView x, Activation activation, Stream& stream);

/// activate() of x in f16 or bf16 to y of the same dtype; both begin at multiples of 16 bytes and
/// have a multiple of 8 elements.
void activate_halves(TensorView y, ConstTensorView x, Activation activation, Stream& stream);

void activate_gate(TensorView y, ConstTensorView gate, ConstTensorView up, Activation activation,
                   Stream& stream);

}  // namespace kvlm::cuda
