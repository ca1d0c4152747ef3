#pragma once

#include "kernels/activation.h"
#include "kernels/base/device.h"

// The CPU's implementation of kernels/activation.h, which has checked the arguments.
namespace kvlm::cpu {

void activate(TensorView y, ConstTensorView x, Activation activation, Stream& stream);

void activate_gate(TensorView y, ConstTensorView gate, ConstTensorView up, Activation activation,
                   Stream& stream);

}  // namespace kvlm::cpu
