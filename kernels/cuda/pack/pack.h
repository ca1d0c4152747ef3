#pragma once

#include "kernels/pack.h"

// The CUDA implementation of kernels/pack.h, which has checked the arguments.
namespace kvlm::cuda {

void pack(const PackedFormat& format, const std::array<PackRule, 2>& rules,
          std::span<const PackJob> jobs, DType dtype, Stream& stream);

}  // namespace kvlm::cuda
