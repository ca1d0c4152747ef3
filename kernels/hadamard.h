#pragma once

#include <span>

#include "kernels/base/tensor.h"

namespace kvlm {

/// Vectors that are turned: every last axis of `from`, to the same place of `to`.
struct HadamardRows {
  ConstTensorView from;  ///< (..., dim)
  TensorView to;         ///< as `from`, which it may be
};

/// to = H from, H the (dim, dim) orthogonal matrix of Sylvester's Hadamard matrices over the root
/// of their order, along its diagonal: one for each power of two that dim is the sum of, the
/// largest first (96: 64, then 32). H is symmetric and its own inverse, so doing it twice undoes
/// it, and (H q) . (H k) = q . k.
///
///   rows  tensors of one dtype, f32 (CUDA also f16 | bf16), and one dim of 1 to 2048
///
/// Sums and differences of neighbours, then of pairs, fours, ..., and one product, in f32: the same
/// bits on every device where the dtype is f32. Asynchronous on CUDA. Throws
/// Error{kInvalidArgument} on a shape, dtype or device mismatch. Source: Ashkboos et al. 2024,
/// "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", section 3, for its use;
/// docs/formulas.md, "Rotation".
void hadamard(std::span<const HadamardRows> rows, Stream& stream);

}  // namespace kvlm
