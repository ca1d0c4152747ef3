#pragma once

#include <memory>
#include <string>

#include "kernels/quantized/layout.h"

namespace kvlm {

/// A matrix (out, in) of f32, f16 or bf16 in host memory, rounded to codes of 4 or 8 bits in groups
/// of 32 inputs, symmetric, with scales in f16, while it is read. No calibration: the group is the
/// only lever.
///
/// 4 bits: of seven scales near max|w| / 8 that which leaves the least squared error. For j in 0,
/// -1, 1, -2, 2, -3, 3, and the value m of the largest magnitude: q = clamp(rne(-w (8 + 0.3 j) /
/// m), -8, 7), and the j that is kept has the largest (sum w q)^2 / sum q^2; then s = f16(sum w q /
/// sum q^2), code = clamp(rne(w / s), -8, 7) + 8. 8 bits: s = f16(max|w| / 127), code = clamp(rne(w
/// / s), -127, 127) + 128. A scale that would be zero is 2^-24, but 0 for a group of zeros. The
/// same bytes on every machine.
///
/// `name` is for messages; the floats must live as long. `activations` is f16 or bf16. read()
/// throws Error{kCorruptFile} naming the element for one that is not finite.
std::unique_ptr<QuantizedSource> round_matrix(std::string name, ConstTensorView floats,
                                              WeightCode code, DType activations);

}  // namespace kvlm
