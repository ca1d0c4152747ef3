#pragma once

#include "kernels/cuda/table_args.cuh"

namespace kvlm::cuda::packed {

constexpr int kGainedRuns = 3;  // of a side: packed rows, and the ring in two runs
constexpr int kMostRuns = 16;   // of a lane

/// Counts a row more for every lane of a step, in all layers.
void count_step(const TableArgs& table, Stream& stream);
/// Stores the step's rows of a layer, (rows, heads, head_dim), as the newest of their rings. What
/// is launched next may start at once, but the kernels of picture_lanes.cu, if there are any.
void store_new_rows(const TableArgs& table, int layer, bool pictures, const float* k,
                    const float* v, Stream& stream);

}  // namespace kvlm::cuda::packed
