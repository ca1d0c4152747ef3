#pragma once

#include <cstddef>
#include <span>

#include "kernels/attend_packed.h"

// The CUDA implementation of kernels/attend_packed.h, which has checked the arguments; a build
// without CUDA links no_cuda/attend_packed.cpp instead, which throws Error{kUnsupported}.
namespace kvlm::cuda {

/// `clamped` counts on the GPU (uint64_t), or is null.
void attend_packed(std::span<PackedLane> lanes, int q_per_kv, int head_dim, float scale,
                   std::byte* clamped, Stream& stream);

void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream);

}  // namespace kvlm::cuda
