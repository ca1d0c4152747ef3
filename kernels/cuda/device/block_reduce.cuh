#pragma once

#include <cmath>

#include "kernels/cuda/device/launch.cuh"

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

/// Makes of the scores of a block's threads, -INFINITY where there is none, what softmax divides by
/// their sum; returns 1 / that sum. All threads call it.
template <int kThreads, int kHeld>
__device__ float make_exponentials(float (&held)[kHeld], float* parts) {
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) maximum = fmaxf(maximum, held[i]);
  maximum = block_reduce<kThreads>(maximum, true, parts);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = __expf(held[i] - maximum);
    sum += held[i];
  }
  return 1.0f / block_reduce<kThreads>(sum, false, parts);
}

}  // namespace kvlm::cuda
