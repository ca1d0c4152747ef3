#pragma once

#include "kernels/sample.h"

// The CPU's implementation of kernels/sample.h, which has checked the arguments.
namespace kvlm::cpu {

void sample_rows(std::span<int32_t> ids, TensorView logits, std::span<const RowSampling> rows,
                 Stream& stream);

int32_t sample_row(std::span<float> logits, const RowSampling& row, std::span<int32_t> workspace);

}  // namespace kvlm::cpu
