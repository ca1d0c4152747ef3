#pragma once

#include "kernels/attention.h"

namespace kvlm::cuda {

/// kvlm::segment_attention() of f32 operands that are multiplied as f16 or bf16, on checked
/// arguments: q * scale, keys and values are rounded to scratch, as attend_prompt() does it.
void attend_rounded(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                    const Segments& segments, float scale, DType multiply, Stream& stream);

}  // namespace kvlm::cuda
