#pragma once

#include "kernels/sample.h"

// The CUDA implementation of kernels/sample.h, which has checked the arguments.
namespace kvlm::cuda {

void sample_rows(std::span<int32_t> ids, TensorView logits, std::span<const RowSampling> rows,
                 Stream& stream);

}  // namespace kvlm::cuda
