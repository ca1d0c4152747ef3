#pragma once

#include <cstddef>
#include <span>

#include "kernels/attend_packed.h"

// The CUDA implementation of kernels/attend_packed.h, which has checked the arguments. Attention
// on a GPU is a DecodeTable's.
namespace kvlm::cuda {

void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream);

}  // namespace kvlm::cuda
