#pragma once

#include <cmath>

#include "kernels/cuda/table/table_args.cuh"

// Which row goes by its attention weight.
namespace kvlm::cuda::packed {

/// A row that may go.
struct Candidate {
  float weight;
  int came;  // -1: none
  int place;
};

/// Whether `a` goes before `b`: it is lighter, or newer. Weights that are no numbers are the
/// heaviest.
__device__ inline bool goes_first(const Candidate& a, const Candidate& b) {
  return a.weight < b.weight || (a.weight == b.weight && a.came > b.came);
}

/// The one of the first `kLanes` candidates of a warp that goes first; in thread 0.
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

/// The candidate of a block of `kThreads` that goes first; in thread 0.
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

/// The weight of a place. Weights that are no numbers are the heaviest.
__device__ inline float weight_of(const DeviceWeighed& of, int place) {
  const float weight = of.weights[place];
  return isnan(weight) ? INFINITY : weight;
}

/// The mean weight of a place over `heads` lanes from `lane` on.
__device__ inline float mean_weight(const TableArgs& table, int lane, int heads, int place) {
  float sum = 0;
  for (int head = 0; head < heads; ++head) sum += table.weighed[lane + head].weights[place];
  const float mean = sum / static_cast<float>(heads);
  return isnan(mean) ? INFINITY : mean;
}

}  // namespace kvlm::cuda::packed
