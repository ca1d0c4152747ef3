#pragma once

#include <span>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

// The CPU's implementation of kernels/elementwise.h, which has checked the arguments.
namespace kvlm::cpu {

void gather_rows(TensorView y, ConstTensorView table, std::span<const int32_t> ids, Stream& stream);

void add(TensorView y, ConstTensorView x, Stream& stream);

void add_scaled(TensorView y, ConstTensorView x, ConstTensorView scale, Stream& stream);

void convert(TensorView y, ConstTensorView x, Stream& stream);

/// to[i] = from[i] for `count` elements of the float formats `from_dtype` and `to_dtype`, rounded
/// to nearest even, on the calling thread. The ranges may not overlap.
void convert_elements(std::byte* to, DType to_dtype, const std::byte* from, DType from_dtype,
                      size_t count);

}  // namespace kvlm::cpu
