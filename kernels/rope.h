#pragma once

#include <span>

#include "kernels/base/tensor.h"

namespace kvlm {

/// Rotates every head of every row of each x by the row's angles, in place, half-split: for
/// i < rotary/2,
///   x'[i]            = x[i] cos[i] - x[i + rotary/2] sin[i]
///   x'[i + rotary/2] = x[i + rotary/2] cos[i] + x[i] sin[i]
/// where rotary = 2 * cos.shape()[1] <= head_dim; channels from rotary on stay.
///
///   xs        (rows, heads, head_dim)  f32: queries and keys, in one launch on CUDA
///   cos, sin  (rows, rotary / 2)       f32
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch. Asynchronous on CUDA.
/// Source: Su et al. 2021, "RoFormer", in the half-split order of the Hugging Face checkpoints.
void rotate(std::span<const TensorView> xs, ConstTensorView cos, ConstTensorView sin,
            Stream& stream);

}  // namespace kvlm
