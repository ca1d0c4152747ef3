#pragma once

#include "kernels/cuda/launch.cuh"

namespace kvlm::cuda {

/// The sum, or the greatest, of the numbers of all kThreads threads of a block. All of them call
/// it; `parts` has room for a number a warp.
template <int kThreads>
__device__ float block_reduce(float x, bool maximum, float* parts) {
  x = maximum ? warp_max(x) : warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float all = parts[0];
  for (int i = 1; i < kThreads / 32; ++i) {
    all = maximum ? fmaxf(all, parts[i]) : all + parts[i];
  }
  return all;
}

}  // namespace kvlm::cuda
