#pragma once

#include <cstddef>
#include <span>

#include "kernels/attend_packed.h"

// CUDA side of kernels/attend_packed.h, which checks the arguments: unpacking only. Attention on a
// GPU goes through DecodeTable (attend_layer.h).
namespace kvlm::cuda {

void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream);

}  // namespace kvlm::cuda
