#pragma once

#include <span>

#include "kernels/attend_packed.h"

// The CPU's implementation of kernels/attend_packed.h, which has checked the arguments.
namespace kvlm::cpu {

void attend_packed(std::span<PackedHead> heads, int q_per_kv, int head_dim, float scale,
                   Stream& stream);

void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream);

}  // namespace kvlm::cpu
