#pragma once

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/packed_codes.h"

// What serves the runs that no kernel of packed_codes.h does: any format, and full rows.
namespace kvlm::cuda::packed {

/// Scores of a launch's runs, whose packed rows have up to `channels` channels.
void score_any(const AttendArgs& args, const Splits& splits, int channels, Stream& stream);
/// Their values' weighted sums.
void add_any(const AttendArgs& args, const Splits& splits, Stream& stream);

}  // namespace kvlm::cuda::packed
