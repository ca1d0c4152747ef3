#pragma once

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/device/block_reduce.cuh"

namespace kvlm::cuda::packed {

/// Remaps those scores of a block's threads that are of a range of slots and not -INFINITY, which
/// is where no row is. All threads call it; `parts` is block_reduce()'s.
template <int kThreads, int kHeld>
__device__ void remap_live(const AttendArgs& args, const ScoreRemap& remap, float (&held)[kHeld],
                           float* parts) {
  if (remap.slots == 0) return;
  const auto is_there = [&](int i) {
    const int at = static_cast<int>(threadIdx.x) + i * kThreads - remap.first;
    return at >= 0 && at < remap.slots && held[i] != -INFINITY;
  };
  float low = INFINITY;
  float high = -INFINITY;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!is_there(i)) continue;
    low = fminf(low, held[i]);
    high = fmaxf(high, held[i]);
  }
  low = -block_reduce<kThreads>(-low, true, parts);
  high = block_reduce<kThreads>(high, true, parts);
  if (low > high) return;  // no row is left
  const float slope = remap_slope(args, remap, low, high, threadIdx.x == 0);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (is_there(i)) held[i] = slope * (held[i] - low) + low - remap.tau_low;
  }
}

}  // namespace kvlm::cuda::packed
