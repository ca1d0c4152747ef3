#pragma once

#include "kernels/cuda/launch.cuh"

namespace kvlm::cuda {

/// Writes row `row` of `rows` (..., head_dim) with the threads of a warp.
__device__ inline void store_row(std::byte* rows, DType dtype, int64_t row, int head_dim,
                                 const float* from) {
  const int64_t first = row * head_dim;
  for (int i = static_cast<int>(threadIdx.x % 32); i < head_dim; i += 32) {
    if (dtype == DType::kF16) {
      reinterpret_cast<__half*>(rows)[first + i] = store_float<__half>(from[i]);
    } else if (dtype == DType::kBF16) {
      reinterpret_cast<__nv_bfloat16*>(rows)[first + i] = store_float<__nv_bfloat16>(from[i]);
    } else {
      reinterpret_cast<float*>(rows)[first + i] = from[i];
    }
  }
}

}  // namespace kvlm::cuda
