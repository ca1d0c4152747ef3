#pragma once

#include <cmath>

#include "kernels/cuda/table_args.cuh"

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

/// The candidate of a block of `kThreads` that goes first; in thread 0.
template <int kThreads>
__device__ Candidate first_of_block(Candidate least) {
  constexpr int kWarps = kThreads / 32;
  __shared__ Candidate of_warps[kWarps];
  const auto among = [&](int lanes) {
    for (int away = lanes / 2; away > 0; away /= 2) {
      const Candidate other{__shfl_down_sync(~0u, least.weight, away),
                            __shfl_down_sync(~0u, least.came, away),
                            __shfl_down_sync(~0u, least.place, away)};
      if (goes_first(other, least)) least = other;
    }
  };
  among(32);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread % 32 == 0) of_warps[thread / 32] = least;
  __syncthreads();
  if (thread >= 32) return least;
  least = thread < kWarps ? of_warps[thread] : Candidate{INFINITY, -1, -1};
  among(kWarps);
  return least;
}

/// The mean weight of a place over `heads` lanes from `lane` on.
__device__ inline float mean_weight(const TableArgs& table, int lane, int heads, int place) {
  float sum = 0;
  for (int head = 0; head < heads; ++head) sum += table.weighed[lane + head].weights[place];
  const float mean = sum / static_cast<float>(heads);
  return isnan(mean) ? INFINITY : mean;
}

}  // namespace kvlm::cuda::packed
