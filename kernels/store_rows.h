#pragma once

#include <span>

#include "kernels/base/tensor.h"

namespace kvlm {

/// Where the rows of one head go, dense, with room for all of them.
struct RowDestination {
  std::byte* data = nullptr;  // (rows, head_dim) dense
};

/// Splits rows by head and converts them: destination[h][r,:] = x[r,h,:] rounded to `dtype`, ties
/// to even.
///
///   x             (rows, heads, head_dim)  f32
///   destinations  (heads,)                 dense rows of `dtype` = f32 | f16 | bf16
///
/// Allocates nothing. Asynchronous on CUDA.
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch.
void store_rows(std::span<const RowDestination> destinations, DType dtype, ConstTensorView x,
                Stream& stream);

}  // namespace kvlm
