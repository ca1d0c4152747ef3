#pragma once

#include "kernels/base/tensor.h"

namespace kvlm {

/// What bytes on the host mean, by a table for every group of columns, on the stream's device:
/// to[r,c] = values[c / (columns / groups), from[r,c]]; columns beyond those of `from` become zero.
/// Images are such bytes until a tower takes them, a quarter of what they are as floats. Memory
/// of the host may be reused when it returns.
///
///   from    (rows, columns)     u8, on the host
///   values  (groups, 256)       f32, on the host; groups divides columns
///   to      (rows, >= columns)  f32 | f16 | bf16, rounded to nearest even
///
/// Throws Error{kInvalidArgument} on a mismatch. Asynchronous on CUDA.
void place_bytes(TensorView to, ConstTensorView from, ConstTensorView values, Stream& stream);

}  // namespace kvlm
