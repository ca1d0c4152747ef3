#pragma once

#include <span>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"
#include "kernels/gemm.h"

// The CPU's implementation of kernels/gemm.h, which has checked the arguments.
namespace kvlm::cpu {

/// linear() of every projection, none of quantized matrices, with or without add.
void linears(std::span<const Projection> projections, ConstTensorView x, bool add, Stream& stream);

}  // namespace kvlm::cpu
