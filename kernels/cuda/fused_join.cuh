#pragma once

#include "kernels/cuda/fused_attention.h"
#include "kernels/cuda/fused_lane.cuh"

// The splits of a lane as one. A block of the fused decode attention that has taken all splits of
// its lane joins them itself; those of other lanes are joined by a kernel of their own
// (fused_attention.cu), which gives the same bits.
namespace kvlm::cuda::packed {

__device__ inline int fused_splits_of(const DeviceLane& lane) {
  const int slots = fused_split_slots(lane.slots);
  return (lane.slots + slots - 1) / slots;
}

/// Writes the output of a query of lane `index`, by kThreads threads. Outputs of the first kAhead
/// splits are asked for before it is known what they weigh.
template <int kAhead>
__device__ inline void join_query(const AttendArgs& args, const FusedArgs& fused,
                                  const DeviceLane& lane, int head_dim, int index, int query) {
  const int splits = fused_splits_of(lane);
  const int thread = static_cast<int>(threadIdx.x % 32);
  const int64_t first = static_cast<int64_t>(index) * fused.splits * args.q_per_kv + query;
  const int64_t stride = static_cast<int64_t>(args.q_per_kv) * head_dim;
  const auto outs_at = [&](int channel) {
    return fused.outs + first * head_dim + min(channel, head_dim - 1);
  };
  float ahead[kAhead + 1];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    ahead[i] = i < splits ? outs_at(static_cast<int>(threadIdx.x))[i * stride] : 0;
  }
  float most = -INFINITY;
  for (int i = thread; i < splits; i += 32) {
    most = fmaxf(most, fused.ends[first + static_cast<int64_t>(i) * args.q_per_kv].x);
  }
  most = warp_max(most);
  for (int pass = 0; pass < head_dim; pass += kThreads) {  // of whole warps, which share weights
    const int channel = pass + static_cast<int>(threadIdx.x);
    const float* outs = outs_at(channel);
    float out = 0;
    float sum = 0;
    for (int base = 0; base < splits; base += 32) {
      const int mine = base + thread;
      float weight = 0;
      if (mine < splits) {
        const float2 end = fused.ends[first + static_cast<int64_t>(mine) * args.q_per_kv];
        weight = exp2f(end.x - most);
        sum += weight * end.y;
      }
      const int count = min(32, splits - base);
      const int known = base == 0 && pass == 0 ? min(kAhead, count) : 0;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i < known) out += __shfl_sync(kAll, weight, i) * ahead[i];
      }
#pragma unroll 8
      for (int i = known; i < count; ++i) {
        out += __shfl_sync(kAll, weight, i) * outs[(base + i) * stride];
      }
    }
    sum = warp_sum(sum);
    if (channel < head_dim) lane.out[query * head_dim + channel] = splits > 0 ? out / sum : 0;
  }
}

}  // namespace kvlm::cuda::packed
