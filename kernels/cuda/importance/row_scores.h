#pragma once

#include "kernels/row_scores.h"

// CUDA's implementation of kernels/row_scores.h, which has checked the arguments.
namespace kvlm::cuda {

void row_norms(std::span<const StoredRows> heads, int head_dim, std::span<double> norms,
               Stream& stream);

void cosines_to_mean(std::span<const StoredRows> heads, int head_dim, std::span<double> cosines,
                     Stream& stream);

}  // namespace kvlm::cuda
