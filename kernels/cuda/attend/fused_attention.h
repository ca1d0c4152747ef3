#pragma once

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/fused_choice.h"
#include "kernels/cuda/attend/packed_tiles.cuh"

// Decode attention over packed and f16 tokens in one pass: launches of fused_kernel.cuh, and the
// merge of the splits' states, which other kernels of a layer write too.
namespace kvlm::cuda::packed {

/// How codes are scaled.
enum class Scaled {
  kChannel,  ///< one scale per channel and block
  kToken,    ///< one scale per token, or one for all (ScaleAxis::kHead)
  kToken32,  ///< one scale for each 32 channels of a token
  kToken64,  ///< one scale for each 64 channels of a token
};

/// Channels of a group; 0: a token has no groups.
constexpr int scaled_group(Scaled scaled) {
  return scaled == Scaled::kToken32 ? 32 : scaled == Scaled::kToken64 ? 64 : 0;
}

/// Arguments of the launches of a layer, besides AttendArgs.
struct FusedArgs {
  // Softmax states: a weight is 2^(score - base), `outs` are weighted values.
  float2* ends;  // (heads, splits, q_per_kv) base, and sum of weights
  float* outs;   // (heads, splits, q_per_kv, head_dim)
  int heads;
  int head_splits;  // most splits of a KV head in one pass
  int splits;       // most states: head_splits for each pass over values
  int pair;         // one-pass kernel of this launch (DeviceHead::fused)
  int blocks;       // that share the splits of a KV head
  int sources;      // most query bases of a KV head
  bool lose_rows;   // some KV heads are placed (DeviceHead::live), or AttendArgs::weighs
};

/// Most groups of queries of a block. More would not fit in registers for a head_dim of 256, and
/// released models with a head_dim of 80 or 96 have few queries.
constexpr int most_groups(int dim) { return dim == 64 || dim == 128 ? 2 : 1; }
/// Groups of queries of a block.
constexpr int fused_groups(int dim, int q_per_kv) {
  return q_per_kv <= kGroupQueries ? 1 : most_groups(dim);
}
/// Blocks among which the queries of a KV head are divided.
constexpr int fused_query_blocks(int dim, int q_per_kv) {
  const int served = fused_groups(dim, q_per_kv) * kGroupQueries;
  return (q_per_kv + served - 1) / served;
}
static_assert(fused_query_blocks(128, 8) == 1 && fused_query_blocks(256, 8) == 2);
/// Blocks per multiprocessor for which registers must suffice.
constexpr int least_blocks(int dim, int groups) { return groups == 1 && dim <= 128 ? 4 : 2; }

/// Resident blocks of a GPU, for blocks of `bytes` of shared memory: a lower bound, from launch
/// bounds and shared memory.
int resident_blocks(int bytes, int head_dim, int groups, Stream& stream);
/// The same for the kernel of `pair`, with `sources` query bases.
int fused_resident_blocks(const AttendArgs& args, int pair, int sources, Stream& stream);
void attend_fused(const AttendArgs& args, const FusedArgs& fused, Stream& stream);
/// Merges the splits of KV heads that several blocks or two passes (two_pass.h) have processed.
///   early  the next kernel may start at once: for unpacked tokens alone. Otherwise products of few
///          rows would take multiprocessors from attention (4 % of a step).
void join_fused(const AttendArgs& args, const FusedArgs& fused, bool early, Stream& stream);

}  // namespace kvlm::cuda::packed
