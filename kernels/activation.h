#pragma once

#include "kernels/base/tensor.h"

namespace kvlm {

enum class Activation : uint8_t {
  kQuickGelu,  ///< x * sigmoid(1.702 x)
  kGelu,       ///< x/2 * (1 + erf(x / sqrt 2))
  kGeluTanh,   ///< x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
  kSilu,       ///< x * sigmoid(x)
};

/// y = activation(x), element by element, to 2 ulp-ish of the float formula (relative 1e-6).
///
///   x  any shape, f32
///   y  the same shape, f32 (CUDA also f16 | bf16, rounded to nearest even); may be x if f32
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch. Asynchronous on CUDA.
void activate(TensorView y, ConstTensorView x, Activation activation, Stream& stream);

/// y = activation(gate) * up, element by element.
///
///   gate, up  equal shape, f32
///   y         the same shape, f32 (CUDA also f16 | bf16, rounded to nearest even); may be gate if
///             f32, and may overlap no operand otherwise
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch. Asynchronous on CUDA.
void activate_gate(TensorView y, ConstTensorView gate, ConstTensorView up, Activation activation,
                   Stream& stream);

}  // namespace kvlm
