#pragma once

#include <span>

#include "kernels/row_batch.h"

// The CUDA implementation of kernels/row_batch.h, which has checked the arguments; a build without
// CUDA links no_cuda/row_batch.cpp instead, which throws Error{kUnsupported}.
namespace kvlm::cuda {

/// RowBatch::attend() of `lanes`, of which there are some; `runs` are those of all.
void attend_row_lanes(std::span<const RowLane> lanes, std::span<const KeyValueRows> runs,
                      int q_per_kv, int head_dim, float scale, Stream& stream);

}  // namespace kvlm::cuda
