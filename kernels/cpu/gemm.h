#pragma once

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

// The CPU's implementation of kernels/gemm.h, which has checked the arguments.
namespace kvlm::cpu {

void linear(TensorView y, ConstTensorView x, ConstTensorView w, ConstTensorView bias, bool add,
            Stream& stream);

}  // namespace kvlm::cpu
