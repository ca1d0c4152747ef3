#pragma once

#include "kernels/slot_weights.h"

// CUDA side of kernels/slot_weights.h, which checks the arguments.
namespace kvlm::cuda {

void mean_arrays(std::span<const float* const> arrays, std::span<const MeanJob> jobs,
                 Stream& stream);

}  // namespace kvlm::cuda
