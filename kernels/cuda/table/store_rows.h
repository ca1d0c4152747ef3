#pragma once

#include "kernels/store_rows.h"

// CUDA implementation of kernels/store_rows.h: keys and values of prompts.
namespace kvlm::cuda {

/// On checked arguments.
void store_rows(std::span<const RowDestination> destinations, DType dtype, ConstTensorView x,
                Stream& stream);

}  // namespace kvlm::cuda
