#pragma once

#include "kernels/slot_weights.h"

// The CPU's implementation of kernels/slot_weights.h, which has checked the arguments.
namespace kvlm::cpu {

void add_slot_weights(std::span<const SlotWeights> heads, int q_per_kv, Stream& stream);

void mean_arrays(std::span<const float* const> arrays, std::span<const MeanJob> jobs,
                 Stream& stream);

}  // namespace kvlm::cpu
