#pragma once

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/fused_choice.h"
#include "kernels/cuda/attend/packed_tiles.cuh"

// Decode attention over packed rows and f16 rows in one pass: scores, softmax and values of a split
// of a lane by one block of threads, then one kernel that merges the splits.
namespace kvlm::cuda::packed {

/// How codes are scaled.
enum class Scaled {
  kChannel,  ///< by channel, alike for the rows of a block
  kToken,    ///< by one number a row, or by one for all (ScaleAxis::kHead)
  kToken32,  ///< by one number for each 32 channels of a row
  kToken64,  ///< by one number for each 64 channels of a row
};

/// Channels of a token that share one of its scales; 0: all, or scales are of channels.
constexpr int scaled_group(Scaled scaled) {
  return scaled == Scaled::kToken32 ? 32 : scaled == Scaled::kToken64 ? 64 : 0;
}

/// What the launches of a layer share beside AttendArgs.
struct FusedArgs {
  // (lanes, splits, q_per_kv) of every split what its weights are relative to, in units of log2,
  // and their sum
  float2* ends;
  float* outs;  // (lanes, splits, q_per_kv, head_dim)
  int lanes;
  int lane_splits;  // of the longest lane, at most
  int splits;       // as many for each pass over the values of a lane, at most
  int pair;         // which lanes a launch serves (DeviceLane::fused)
  int blocks;       // that share the splits of a lane
  int sources;      // of queries, the most of a lane
  bool lose_rows;   // some lanes are placed (DeviceLane::live), or AttendArgs::weighs
};

/// Groups of queries that a block serves at most: registers hold no more of long rows, and released
/// models with rows of 80 or 96 channels have few queries.
constexpr int most_groups(int dim) { return dim == 64 || dim == 128 ? 2 : 1; }
/// Groups of queries that blocks serve.
constexpr int fused_groups(int dim, int q_per_kv) {
  return q_per_kv <= kGroupQueries ? 1 : most_groups(dim);
}
/// Blocks that the queries of a lane take.
constexpr int fused_query_blocks(int dim, int q_per_kv) {
  const int served = fused_groups(dim, q_per_kv) * kGroupQueries;
  return (q_per_kv + served - 1) / served;
}
static_assert(fused_query_blocks(128, 8) == 1 && fused_query_blocks(256, 8) == 2);
/// Blocks of a multiprocessor, for which registers are to suffice.
constexpr int least_blocks(int dim, int groups) { return groups == 1 && dim <= 128 ? 4 : 2; }

/// Blocks of so many bytes of shared memory that the GPU holds at a time: by what launch bounds
/// promise and shared memory allows, so it may hold more.
int resident_blocks(int bytes, int head_dim, int groups, Stream& stream);
/// Those of the kernel of `pair`, for lanes of so many sources.
int fused_resident_blocks(const AttendArgs& args, int pair, int sources, Stream& stream);
void attend_fused(const AttendArgs& args, const FusedArgs& fused, Stream& stream);
/// Merges the splits of lanes that several blocks or two passes (two_pass.h) have served.
///   early  the next kernel may start at once: of unpacked tokens alone. Elsewhere a product of few
///          rows would take multiprocessors from the kernels that attend (4 % of a step).
void join_fused(const AttendArgs& args, const FusedArgs& fused, bool early, Stream& stream);

}  // namespace kvlm::cuda::packed
