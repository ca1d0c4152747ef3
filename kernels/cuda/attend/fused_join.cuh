#pragma once

#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_lane.cuh"

// The splits of a lane as one. A block of the fused decode attention that has taken all splits of
// its lane joins them itself; those of other lanes are joined by a kernel of their own
// (fused_attention.cu), which gives the same bits.
namespace kvlm::cuda::packed {

/// Whether one block has all splits of a lane, and joins them.
VLM_HD inline bool has_all_splits(const FusedArgs& fused, int splits) {
  return fused.blocks == 1 || splits == 1;
}

/// A sum of outputs of 4 channels by weights.
struct WeighedSum {
  float4 out = {0, 0, 0, 0};
  float weights = 0;

  __device__ void add(float weight, float their_weights, const float4& theirs) {
    weights += weight * their_weights;
    out.x += weight * theirs.x;
    out.y += weight * theirs.y;
    out.z += weight * theirs.z;
    out.w += weight * theirs.w;
  }
  /// Divided by the weights, as the output of a query from channel 4 `four` on.
  __device__ void write(const DeviceLane& lane, int head_dim, int query, int four) const {
    reinterpret_cast<float4*>(lane.out + query * head_dim)[four] = {
        out.x / weights, out.y / weights, out.z / weights, out.w / weights};
  }
  __device__ void shrink(float factor) {
    weights *= factor;
    out.x *= factor;
    out.y *= factor;
    out.z *= factor;
    out.w *= factor;
  }
};

/// Writes the outputs of queries [first_query, end_query) of lane `index`, by the threads of a
/// block, 4 channels each. The states of kAhead splits are asked for together.
template <int kAhead>
__device__ void join_queries(const AttendArgs& args, const FusedArgs& fused, const DeviceLane& lane,
                             int head_dim, int index, int first_query, int end_query) {
  const int splits = fused_splits_of(lane.slots);
  const int fours = head_dim / 4;
  const int64_t first = static_cast<int64_t>(index) * fused.splits * args.q_per_kv;
  for (int item = static_cast<int>(threadIdx.x); item < (end_query - first_query) * fours;
       item += static_cast<int>(blockDim.x)) {
    const int query = first_query + item / fours;
    const int four = item % fours;
    const float2* ends = fused.ends + first + query;
    const auto* outs = reinterpret_cast<const float4*>(fused.outs) + (first + query) * fours + four;
    float most = -INFINITY;
    WeighedSum sum;
    for (int split = 0; split < splits; split += kAhead) {
      float2 end[kAhead];
      float4 out[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const auto at = static_cast<int64_t>(min(split + i, splits - 1)) * args.q_per_kv;
        end[i] = ends[at];
        out[i] = outs[at * fours];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (split + i >= splits) break;
        if (end[i].x > most) {
          sum.shrink(exp2f(most - end[i].x));
          most = end[i].x;
        }
        sum.add(exp2f(end[i].x - most), end[i].y, out[i]);
      }
    }
    sum.write(lane, head_dim, query, four);
  }
}

}  // namespace kvlm::cuda::packed
