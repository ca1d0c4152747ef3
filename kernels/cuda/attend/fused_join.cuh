#pragma once

#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_head.cuh"

// Merges the softmax states (base m, sum of weights l, weighted values o) of a KV head's splits,
// from whichever kernel: out = sum_i 2^(m_i - m) o_i / sum_i 2^(m_i - m) l_i, m the largest base.
// Three callers give the same bits: a block of fused_kernel.cuh that has all splits of its KV head;
// join_splits() (fused_attention.cu); and weigh_rows.cu, which also adds attention weights.
namespace kvlm::cuda::packed {

/// Whether one block has all splits of a KV head, and merges them.
VLM_HD inline bool has_all_splits(const FusedArgs& fused, int splits) {
  return fused.blocks == 1 || splits == 1;
}

__device__ inline void add_weighed(float& sum, float weight, float x) { sum += weight * x; }
__device__ inline void add_weighed(float4& sum, float weight, const float4& x) {
  sum = {sum.x + weight * x.x, sum.y + weight * x.y, sum.z + weight * x.z, sum.w + weight * x.w};
}
__device__ inline float divided(float x, float by) { return x / by; }
__device__ inline float4 divided(const float4& x, float by) {
  return {x.x / by, x.y / by, x.z / by, x.w / by};
}

/// A weighted sum of outputs of neighbouring channels. Channels is float4, or float if head_dim is
/// no multiple of 4.
template <class Channels>
struct WeighedSum {
  Channels out{};
  float weights = 0;

  __device__ void add(float weight, float their_weights, const Channels& theirs) {
    weights += weight * their_weights;
    add_weighed(out, weight, theirs);
  }
  /// Writes the `at`-th Channels of a query's output: the sum divided by the weights.
  __device__ void write(float* to, int head_dim, int query, int at) const {
    reinterpret_cast<Channels*>(to + query * head_dim)[at] = divided(out, weights);
  }
};

/// Indices of the states of KV head `index` of a launch: one for each split, or, with passes over
/// values, for each pass those of the splits in which it has slots.
struct SplitPlaces {
  const SplitRange* splits;  // on the GPU: an index into a copy would cost local memory
  int passes;
  int of_pass;  // indices of a pass
  int first;    // index of the first state, if there is at most one pass
  int count;

  __device__ SplitPlaces(const AttendArgs& args, const FusedArgs& fused, int index)
      : of_pass(fused.head_splits), first(0) {
    const DeviceHead& head = args.heads[head_at(args, index)];
    splits = head.splits;
    passes = head.passes;
    count = passes == 0 ? fused_splits_of(head.slots) : 0;
    for (int pass = 0; pass < passes; ++pass) count += splits[pass].end - splits[pass].first;
    if (passes == 1) first = splits[0].first;
  }
  /// Index of state i.
  __device__ int at(int i) const {
    if (passes <= 1) return first + i;
    for (int pass = 0; pass < passes; ++pass) {
      const SplitRange of = splits[pass];
      if (i < of.end - of.first) return pass * of_pass + of.first + i;
      i -= of.end - of.first;
    }
    return i;
  }
};

constexpr int kJoinAhead = 16;  // all splits of a KV head of 4096 slots

/// Writes the outputs of queries [first_query, end_query) of KV head `index` to `to`, by the
/// threads of a block. The states of kAhead splits are loaded together.
template <int kAhead, class Channels = float4>
__device__ void join_queries(const AttendArgs& args, const FusedArgs& fused,
                             const SplitPlaces& places, float* to, int head_dim, int index,
                             int first_query, int end_query) {
  const int splits = places.count;
  const int each = head_dim / static_cast<int>(sizeof(Channels) / sizeof(float));
  const int64_t first = static_cast<int64_t>(index) * fused.splits * args.q_per_kv;
  for (int item = static_cast<int>(threadIdx.x); item < (end_query - first_query) * each;
       item += static_cast<int>(blockDim.x)) {
    const int query = first_query + item / each;
    const int channels = item % each;
    const float2* ends = fused.ends + first + query;
    const auto* outs =
        reinterpret_cast<const Channels*>(fused.outs) + (first + query) * each + channels;
    float2 end[kAhead];
    Channels out[kAhead];
    const auto load = [&](int split) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const auto at = static_cast<int64_t>(places.at(min(split + i, splits - 1))) * args.q_per_kv;
        end[i] = ends[at];
        out[i] = outs[at * each];
      }
    };
    load(0);
    float most = -INFINITY;  // over all splits first: then their weights are independent
#pragma unroll
    for (int i = 0; i < kAhead; ++i) most = fmaxf(most, end[i].x);
    for (int split = kAhead; split < splits; ++split) {
      most = fmaxf(most, ends[static_cast<int64_t>(places.at(split)) * args.q_per_kv].x);
    }
    WeighedSum<Channels> sum;
    for (int split = 0; split < splits; split += kAhead) {
      if (split > 0) load(split);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (split + i < splits) sum.add(exp2f(end[i].x - most), end[i].y, out[i]);
      }
    }
    sum.write(to, head_dim, query, channels);
  }
}

/// join_queries() for any head_dim.
template <int kAhead>
__device__ void join_any_queries(const AttendArgs& args, const FusedArgs& fused,
                                 const SplitPlaces& places, float* to, int index, int first_query,
                                 int end_query) {
  const int head_dim = args.head_dim;
  if (head_dim % 4 == 0) {
    join_queries<kAhead>(args, fused, places, to, head_dim, index, first_query, end_query);
  } else {
    join_queries<1, float>(args, fused, places, to, head_dim, index, first_query, end_query);
  }
}

/// Log2 of the sum of 2^score over a KV head's slots, by a warp.
__device__ inline float log_sum_of(const AttendArgs& args, const FusedArgs& fused,
                                   const SplitPlaces& places, int index, int query) {
  const float2* ends =
      fused.ends + static_cast<int64_t>(index) * fused.splits * args.q_per_kv + query;
  float top = -INFINITY;
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x % 32); i < places.count; i += 32) {
    const float2 end = ends[static_cast<int64_t>(places.at(i)) * args.q_per_kv];
    if (end.x > top) {
      sum *= exp2f(top - end.x);
      top = end.x;
    }
    sum += exp2f(end.x - top) * end.y;
  }
  const float most = warp_max(top);
  return most + log2f(warp_sum(sum * exp2f(top - most)));
}

}  // namespace kvlm::cuda::packed
