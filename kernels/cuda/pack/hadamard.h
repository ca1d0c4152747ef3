#pragma once

#include "kernels/base/device.h"
#include "kernels/hadamard.h"

// The CUDA implementation of kernels/hadamard.h, which has checked the arguments.
namespace kvlm::cuda {

void hadamard(std::span<const HadamardRows> rows, Stream& stream);

}  // namespace kvlm::cuda
