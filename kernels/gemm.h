#pragma once

#include <span>

#include "kernels/base/tensor.h"

namespace kvlm {

/// y[r,:] = x[r,:] * W^T + bias   or, with add, y[r,:] += x[r,:] * W^T + bias.
///
///   x     (rows, in)    f32 (CUDA also f16 | bf16, as y)
///   w     (out, in)     f32 | f16 | bf16, read in its own format, accumulated in f32
///   bias  (out,)        f32; may be empty()
///   y     (rows, out)   as x; may not alias x
///
/// A row of y depends on its row of x alone, bit for bit: not on `rows` while rows <=
/// kMaxDecodeRows, and never on the number of threads. Asynchronous on CUDA.
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch.
void linear(TensorView y, ConstTensorView x, ConstTensorView w, ConstTensorView bias, bool add,
            Stream& stream);

/// One of several products of the same x.
struct LinearPart {
  TensorView y;          ///< (rows, out)
  ConstTensorView w;     ///< (out, in)
  ConstTensorView bias;  ///< (out,); may be empty()
};

/// linear() of every part, without add: the same bits, in fewer passes over x and fewer launches.
void linears(std::span<const LinearPart> parts, ConstTensorView x, Stream& stream);

/// Up to this many rows `linear` streams the weights once and computes each row as it would alone;
/// above it uses the library's matrix product.
inline constexpr int64_t kMaxDecodeRows = 16;

}  // namespace kvlm
