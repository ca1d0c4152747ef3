#pragma once

#include <cfloat>

#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_join.cuh"
#include "kernels/cuda/attend/fused_values.cuh"

// Softmax states: (base, sum of weights, weighted values), where a weight is 2^(score - base).
// A warp has the state of one part of a split. The parts of a split are merged in slot order: by
// write_split() if warps share the split, by add_part() if one warp takes all of it. Both give the
// same bits. fused_join.cuh merges splits.
namespace kvlm::cuda::packed {

constexpr float kSlack = 2;  // weights are up to 2^2

__device__ inline float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Online softmax of a warp, for query `quarter` of each group.
template <int kGroups>
struct OnlineSoftmax {
  float base[kGroups];  // a weight is 2^(score - base)
  float sum[kGroups];   // of the weights of this thread's slots

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) base[group] = -INFINITY, sum[group] = 0;
  }

  /// Replaces the scores of an item by weights. Returns whether earlier sums must be multiplied by
  /// `factor`. That is rare: the base changes only when a weight would exceed 2^kSlack.
  __device__ bool weigh(Scores<kGroups>& scores, float (&factor)[kGroups]) {
    bool shrinks = false;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float high = -INFINITY;
#pragma unroll
      for (int i = 0; i < 2 * kItemTiles; ++i) high = fmaxf(high, scores.of[i / 2][group][i % 2]);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {  // threads of one quarter
        high = fmaxf(high, __shfl_xor_sync(kAll, high, offset));
      }
      const float old = base[group];
      factor[group] = 1;
      if (high > old + kSlack) {
        base[group] = high;
        factor[group] = power_of_2(old - high);
        sum[group] *= factor[group];
        shrinks = shrinks || old != -INFINITY;
      }
#pragma unroll
      for (int i = 0; i < 2 * kItemTiles; ++i) {
        float& x = scores.of[i / 2][group][i % 2];
        x = power_of_2(x - base[group]);
        sum[group] += x;
      }
    }
    return __any_sync(kAll, shrinks) != 0;
  }

  /// Base, and sum of weights over all threads.
  __device__ float2 end(int group) const {
    float all = sum[group];
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) all += __shfl_xor_sync(kAll, all, offset);
    return {base[group], all};
  }
};

/// Shared memory for the states of parts: for other warps, or until the warp's own next part.
template <class Stages, class V, int kGroups>
struct SplitSpace {
  static constexpr int kQueries = kGroups * kGroupQueries;
  static constexpr int kOutStride = V::kDim + 4;  // padded; four floats are written at a time
  static constexpr int kOutBytes = static_cast<int>(sizeof(float)) * kQueries * kOutStride;
  /// Outputs reuse the second stages, idle by then, if four blocks have no room otherwise.
  static constexpr bool kInStages = sizeof(typename Stages::OneStage) >= kOutBytes &&
                                    kWarps * (sizeof(Stages) + kOutBytes) > 44 * 1024;
  static constexpr int kEndBytes = kWarps * kQueries * static_cast<int>(sizeof(float2));
  /// With the stages.
  static constexpr int kBytes =
      static_cast<int>(kWarps * sizeof(Stages)) + kEndBytes + (kInStages ? 0 : kWarps * kOutBytes);

  std::byte* from;

  __device__ Stages& stages(int warp) const { return reinterpret_cast<Stages*>(from)[warp]; }
  /// By query and channel (write_split()), or in thread order (add_part()).
  __device__ float* outs(int warp) const {
    if (kInStages) return reinterpret_cast<float*>(&stages(warp).stage[1]);
    return reinterpret_cast<float*>(from + kWarps * sizeof(Stages) + kEndBytes + warp * kOutBytes);
  }
  /// Base and sum of weights.
  __device__ float2& end(int warp, int query) const {
    auto* ends = reinterpret_cast<float2*>(from + kWarps * sizeof(Stages));
    return ends[warp * kQueries + query];
  }
};

/// Merges two states. A state without slots has a base of -inf and sums of 0.
struct Merge {
  float2 end;  // base and sum of weights
  float of_first;
  float of_second;

  __device__ Merge(float2 first, float2 second) {
    const float base = fmaxf(first.x, second.x);
    of_first = first.x == base ? 1 : power_of_2(first.x - base);
    of_second = second.x == base ? 1 : power_of_2(second.x - base);
    end = {base, of(first.y, second.y)};
  }
  /// Merged sum of weights, or of weighted values.
  __device__ float of(float first, float second) const {
    return __fmaf_rn(of_first, first, __fmul_rn(of_second, second));
  }
};

/// Where to write the state of a split, if its KV head has several.
struct SplitAt {
  float2* ends;  // by query, from first_query on
  float* outs;
  int queries;  // from first_query on

  __device__ SplitAt(const AttendArgs& args, const FusedArgs& fused, int head, int split,
                     int first_query, int head_dim)
      : queries(args.q_per_kv - first_query) {
    const auto at = static_cast<int64_t>(head * fused.splits + split) * args.q_per_kv + first_query;
    ends = fused.ends + at;
    outs = fused.outs + at * head_dim;
  }
  template <bool kLosesRows>
  __device__ void write_end(int query, float2 end) const {
    // Without tokens: finite, since a merge of -inf bases would give NaN.
    if constexpr (kLosesRows) end.x = fmaxf(end.x, -FLT_MAX);
    ends[query] = end;
  }
};

/// Merges part `part` into the state of a split that this warp takes alone: keeps the state in
/// shared memory, or writes it after the last part.
template <bool kLosesRows, class Space, class V, Scaled kScaled, int kGroups>
__device__ void add_part(const SplitAt& to, int part, const Space& space,
                         const OnlineSoftmax<kGroups>& softmax,
                         const Values<V, kScaled, kGroups>& values, const OperandThread& my) {
  using Layout = typename Values<V, kScaled, kGroups>::Layout;
  constexpr int kPairs = Layout::kNumbers / 2;
  const bool first = part == 0;
  const bool last = part == kSplitParts - 1;
  __syncwarp();  // the previous part's state is visible, even if this part is empty
  auto* kept = reinterpret_cast<float2*>(space.outs(my.warp)) + threadIdx.x % 32;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int query = group * kGroupQueries + my.quarter;
    const bool written = last && query < to.queries;
    float2& end = space.end(my.warp, query);
    const Merge merge(first ? float2{-INFINITY, 0} : end, softmax.end(group));
    __syncwarp();  // all threads have read `end`
    if (my.row == 0 && !last) end = merge.end;
    if (my.row == 0 && written) to.write_end<kLosesRows>(query, merge.end);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float2 sum = {values.sum(group, 2 * pair), values.sum(group, 2 * pair + 1)};
      float2& before = kept[(group * kPairs + pair) * 32];
      if (!first) sum = {merge.of(before.x, sum.x), merge.of(before.y, sum.y)};
      if (!last) before = sum;
      float* out = to.outs + query * V::kDim + Layout::channel(2 * pair, my.row);
      if (written) *reinterpret_cast<float2*>(out) = sum;
    }
  }
}

/// Merges the parts of a split that the warps of a block share, and writes its state; or, if it is
/// the `only` split of KV head blockIdx.x, the output. The KV head is read again to save registers.
template <bool kLosesRows, class Space, class V, Scaled kScaled, int kGroups>
__device__ void write_split(const AttendArgs& args, const SplitAt& to, bool only, int first_query,
                            const Space& space, const OnlineSoftmax<kGroups>& softmax,
                            const Values<V, kScaled, kGroups>& values, const OperandThread& my) {
  using Layout = typename Values<V, kScaled, kGroups>::Layout;
  constexpr int kDim = V::kDim;
  constexpr int kQueries = Space::kQueries;
  __syncthreads();  // all have read the previous split
  float* outs = space.outs(my.warp);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int at = group * kGroupQueries + my.quarter;
    const float2 end = softmax.end(group);
    if (my.row == 0) space.end(my.warp, at) = end;
    constexpr int kAdjacent = Layout::kAdjacent;
#pragma unroll
    for (int number = 0; number < Layout::kNumbers; number += kAdjacent) {
      float* own = outs + at * Space::kOutStride + Layout::channel(number, my.row);
      const auto sum = [&](int i) { return values.sum(group, number + i); };
      if (kAdjacent == 2 || number + kAdjacent > Layout::kNumbers) {
        reinterpret_cast<float2*>(own)[0] = {sum(0), sum(1)};
      } else {
#pragma unroll
        for (int i = 0; i < kAdjacent; i += 4) {
          reinterpret_cast<float4*>(own)[i / 4] = {sum(i), sum(i + 1), sum(i + 2), sum(i + 3)};
        }
      }
    }
  }
  __syncthreads();
  constexpr int kFours = kDim / 4;
  const int queries = min(kQueries, to.queries);
  for (int i = static_cast<int>(threadIdx.x); i < queries * kFours; i += kThreads) {
    const int query = i / kFours;
    const auto out_of = [&](int warp) {
      const float* out = space.outs(warp) + query * Space::kOutStride;
      return reinterpret_cast<const float4*>(out)[i % kFours];
    };
    float2 end = space.end(0, query);
    float4 out = out_of(0);
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) {
      const Merge merge(end, space.end(warp, query));
      const float4 next = out_of(warp);
      end = merge.end;
      out = {merge.of(out.x, next.x), merge.of(out.y, next.y), merge.of(out.z, next.z),
             merge.of(out.w, next.w)};
    }
    if (only) {
      const DeviceHead head = head_of(args, head_at(args, static_cast<int>(blockIdx.x)));
      WeighedSum<float4>{out, end.y}.write(head.out, kDim, first_query + query, i % kFours);
      continue;
    }
    reinterpret_cast<float4*>(to.outs)[i] = out;
    if (i % kFours == 0) to.write_end<kLosesRows>(query, end);
  }
  if (Space::kInStages) __syncthreads();  // before copies overwrite it
}

}  // namespace kvlm::cuda::packed
