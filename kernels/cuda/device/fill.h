#pragma once

#include <cstdint>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

// The CUDA implementation of kernels/fill.h, which has checked the arguments.
namespace kvlm::cuda {

void fill_random(TensorView out, uint64_t seed, float width, Stream& stream);

}  // namespace kvlm::cuda
