#pragma once

#include "kernels/base/tensor.h"

namespace kvlm {

/// y[r,:] = x[r,:] * weight / sqrt(mean(x[r,:]^2) + eps), accumulated in float.
///
///   x       (rows, dim)  f32
///   y       (rows, dim)  f32 (CUDA also f16 | bf16, rounded to nearest even); may be x if f32
///   weight  (dim,)       f32
///   eps     added to the mean square, unitless
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch. Asynchronous on CUDA.
/// Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
void rms_norm(TensorView y, ConstTensorView x, ConstTensorView weight, float eps, Stream& stream);

/// y[r,:] = (x[r,:] - mean) / sqrt(var + eps) * weight + bias, biased variance, accumulated in
/// float.
///
///   x             (rows, dim)  f32
///   y             (rows, dim)  f32 (CUDA also f16 | bf16, to nearest even); may be x if f32
///   weight, bias  (dim,)       f32
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch. Asynchronous on CUDA.
/// Source: Ba, Kiros & Hinton 2016, "Layer Normalization".
void layer_norm(TensorView y, ConstTensorView x, ConstTensorView weight, ConstTensorView bias,
                float eps, Stream& stream);

/// x += p * scale, then y = layer_norm(x), or rms_norm(x) where `bias` is empty: what stands
/// between two products of a transformer, in one pass over memory.
///
///   x             (rows, dim)  f32
///   p             (rows, dim)  f32 (CUDA also f16 | bf16)
///   scale         (dim,)       f32; empty for 1
///   y             (rows, dim)  as of layer_norm(), apart from x and p; empty if only x is wanted
///   weight, bias  as of layer_norm()
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch. Asynchronous on CUDA.
void add_norm(TensorView y, TensorView x, ConstTensorView p, ConstTensorView scale,
              ConstTensorView weight, ConstTensorView bias, float eps, Stream& stream);

}  // namespace kvlm
