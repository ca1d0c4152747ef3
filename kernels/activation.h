#pragma once

#include "kernels/base/tensor.h"

namespace kvlm {

enum class Activation : uint8_t {
  kQuickGelu,  ///< x * sigmoid(1.702 x)
  kGelu,       ///< x/2 * (1 + erf(x / sqrt 2))
  kGeluTanh,   ///< x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
  kSilu,       ///< x * sigmoid(x)
};

/// x = activation(x), element by element, in place, to 2 ulp-ish of the float formula (relative
/// 1e-6).
///
///   x  any shape, f32 (CUDA also f16 | bf16)
void activate(TensorView x, Activation activation, Stream& stream);

/// gate = activation(gate) * up, element by element, in place.
///
///   gate, up  equal shape, f32 (CUDA also f16 | bf16)
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch. Asynchronous on CUDA.
void activate_gate(TensorView gate, ConstTensorView up, Activation activation, Stream& stream);

}  // namespace kvlm
