#pragma once

#include "kernels/row_moves.h"

namespace kvlm::cpu {

/// kvlm::widen_rows and kvlm::narrow_rows on checked arguments.
void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream);
void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream);

}  // namespace kvlm::cpu
