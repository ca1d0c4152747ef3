#pragma once

#include <cmath>

#include "kernels/cuda/table/table_args.cuh"

// The token to evict by weight or score: the least, ties to the newest. Reductions over a warp, a
// thread block and the KV heads of a layer.
namespace kvlm::cuda::packed {

/// A token that may be evicted.
struct Candidate {
  float weight;
  int came;  // -1: none
  int place;
};

/// Whether `a` is evicted before `b`: it has less weight, or as much and is newer.
__device__ inline bool goes_first(const Candidate& a, const Candidate& b) {
  return a.weight < b.weight || (a.weight == b.weight && a.came > b.came);
}

/// The candidate of the first `kLanes` warp lanes to evict; in lane 0.
template <int kLanes = 32>
__device__ Candidate first_of_warp(Candidate least) {
  for (int away = kLanes / 2; away > 0; away /= 2) {
    const Candidate other{__shfl_down_sync(~0u, least.weight, away),
                          __shfl_down_sync(~0u, least.came, away),
                          __shfl_down_sync(~0u, least.place, away)};
    if (goes_first(other, least)) least = other;
  }
  return least;
}

/// The candidate of a block of `kThreads` to evict; in thread 0.
template <int kThreads>
__device__ Candidate first_of_block(Candidate least) {
  constexpr int kWarps = kThreads / 32;
  __shared__ Candidate of_warps[kWarps];
  least = first_of_warp(least);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread % 32 == 0) of_warps[thread / 32] = least;
  __syncthreads();
  if (thread >= 32) return least;
  return first_of_warp<kWarps>(thread < kWarps ? of_warps[thread] : Candidate{INFINITY, -1, -1});
}

/// The weight of a place; NaN counts as infinite.
__device__ inline float weight_of(const DeviceWeighed& of, int place) {
  const float weight = of.weights[place];
  return isnan(weight) ? INFINITY : weight;
}

/// The mean weight of a place over `heads` KV heads from `head` on.
__device__ inline float mean_weight(const TableArgs& table, int head, int kv_heads, int place) {
  float sum = 0;
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head)
    sum += table.weighed[head + kv_head].weights[place];
  const float mean = sum / static_cast<float>(kv_heads);
  return isnan(mean) ? INFINITY : mean;
}

}  // namespace kvlm::cuda::packed
