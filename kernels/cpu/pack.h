#pragma once

#include "kernels/pack.h"

// The CPU implementation of kernels/pack.h, which has checked the arguments.
namespace kvlm::cpu {

void pack(const PackedFormat& format, const std::array<PackRule, 2>& rules,
          std::span<const PackJob> jobs, DType dtype, Stream& stream);

}  // namespace kvlm::cpu
