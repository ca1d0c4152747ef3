#pragma once

#include "kernels/expected_attention.h"

// CUDA's implementation of kernels/expected_attention.h, which has checked the arguments.
namespace kvlm::cuda {

void expected_attention(const FutureQueries& future, ConstTensorView q,
                        std::span<const StoredRows> keys, std::span<double> weights,
                        Stream& stream);

}  // namespace kvlm::cuda
