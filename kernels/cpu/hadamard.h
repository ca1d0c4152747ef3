#pragma once

#include "kernels/base/device.h"
#include "kernels/hadamard.h"

// The CPU's implementation of kernels/hadamard.h, which has checked the arguments.
namespace kvlm::cpu {

void hadamard(std::span<const HadamardRows> rows, Stream& stream);

}  // namespace kvlm::cpu
