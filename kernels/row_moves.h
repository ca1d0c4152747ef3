#pragma once

#include <cstddef>
#include <span>

#include "kernels/base/device.h"
#include "kernels/base/dtype.h"

namespace kvlm {

/// out[i,:] = row i, widened.
///
///   rows  each (dim,) of `dtype` = f32 | f16 | bf16
///   out   (rows, dim) f32
///
/// All on the stream's device. Asynchronous on CUDA.
void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream);

/// Row i = x[i,:], rounded to `dtype`, ties to even: widen_rows() the other way.
void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream);

}  // namespace kvlm
