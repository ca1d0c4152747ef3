#pragma once

#include "kernels/cuda/table/table_args.cuh"

namespace kvlm::cuda::packed {

constexpr int kGainedRuns = 3;  // of a side: packed rows, and the ring in two runs
constexpr int kMostRuns = 16;   // of a lane

/// Counts a row more for every lane of a step, in all layers. What it writes stands until all
/// layers have attended, and is read by kernels before they wait for those in front of them. That
/// is right because this, and all that changes lanes, runs and codes between two steps, is launched
/// in the ordinary way, and because the step's first store_new_rows() waits.
void count_step(const TableArgs& table, Stream& stream);
/// Stores the step's rows of a layer, (rows, heads, head_dim), as the newest of their rings.
///   waits  nothing behind may start before all that was queued is done: for the first rows that
///          are stored behind count_step(), and in front of picture_lanes.cu, which reads queries
///          before it waits
void store_new_rows(const TableArgs& table, int layer, bool waits, const float* k, const float* v,
                    Stream& stream);

}  // namespace kvlm::cuda::packed
