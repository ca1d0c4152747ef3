#pragma once

#include <span>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

// The CUDA implementation of kernels/elementwise.h, which has checked the arguments.
namespace kvlm::cuda {

void gather_rows(TensorView y, ConstTensorView table, std::span<const int32_t> ids, Stream& stream);

void add(TensorView y, ConstTensorView x, Stream& stream);

void add_scaled(TensorView y, ConstTensorView x, ConstTensorView scale, Stream& stream);

void convert(TensorView y, ConstTensorView x, Stream& stream);

}  // namespace kvlm::cuda
