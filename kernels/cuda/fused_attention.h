#pragma once

#include "kernels/cuda/attend_args.cuh"
#include "kernels/cuda/fused_choice.h"

// Decode attention over packed rows and f16 rows in one pass: scores, softmax and values of a split
// of a lane by one block of threads, then one kernel that merges the splits.
namespace kvlm::cuda::packed {

/// How codes are scaled.
enum class Scaled {
  kChannel,  ///< by channel, alike for the rows of a block
  kToken,    ///< by one number a row, or by one for all (ScaleAxis::kHead)
  kToken32,  ///< by one number for each 32 channels of a row
};

/// What the launches of a layer share beside AttendArgs.
struct FusedArgs {
  float2* ends;  // (lanes, splits, q_per_kv) maximum and sum of every split, in units of log2
  float* outs;   // (lanes, splits, q_per_kv, head_dim)
  int lanes;
  int splits;      // of the longest lane, at most
  int pair;        // which lanes a launch serves (DeviceLane::fused)
  int blocks;      // that share the splits of a lane
  int sources;     // of queries, the most of a lane
  bool lose_rows;  // some lanes are placed (DeviceLane::live)
};

/// Blocks that share the up to `splits` splits of a lane, of `lanes`. Those of a block follow each
/// other, which saves the work between them but leaves a GPU with few lanes idle. No result depends
/// on it.
int fused_blocks_of_lane(int64_t lanes, int splits, Stream& stream);
void attend_fused(const AttendArgs& args, const FusedArgs& fused, Stream& stream);
/// Merges the splits of the lanes that attend_fused() has served, but of those that one block has.
void join_fused(const AttendArgs& args, const FusedArgs& fused, Stream& stream);

}  // namespace kvlm::cuda::packed
