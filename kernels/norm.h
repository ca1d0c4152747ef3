#pragma once

#include <cstdint>
#include <span>

#include "kernels/base/tensor.h"

namespace kvlm {

/// y[r,:] = x[r,:] * weight / sqrt(mean(x[r,:]^2) + eps), accumulated in float.
///
///   x       (rows, dim)  f32
///   y       (rows, dim)  f32 (CUDA also f16 | bf16, rounded to nearest even); may be x if f32
///   weight  (dim,)       f32
///   eps     added to the mean square, unitless
///
/// On CUDA weight may be read before what is queued ahead is done, so only copies, or work that the
/// host has waited for, may have written it.
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

/// What add_norm() adds to a residual: (p + bias) * scale.
struct Addend {
  ConstTensorView p;           ///< (rows, dim) f32 (CUDA also f16 | bf16)
  ConstTensorView bias = {};   ///< (dim,) f32; empty for 0
  ConstTensorView scale = {};  ///< (dim,) f32; empty for 1
};

/// What becomes of the residual that add_norm() is given.
enum class Residual : uint8_t {
  kSum,   ///< it becomes the sum
  kSame,  ///< it stays, and the sum is seen by the norm alone
};

/// y = layer_norm(sum), or rms_norm(sum) where `bias` is empty, of the sum of x and the addends:
/// what stands between two products of a transformer, in one pass over memory.
///
///   x             (rows, dim)  f32
///   addends       one or two, apart from x
///   y             (rows, dim)  as of layer_norm(), apart from x and the addends; empty if only the
///                 sum is wanted
///   weight, bias  as of layer_norm()
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch. Asynchronous on CUDA.
void add_norm(TensorView y, TensorView x, Residual residual, std::span<const Addend> addends,
              ConstTensorView weight, ConstTensorView bias, float eps, Stream& stream);

}  // namespace kvlm
