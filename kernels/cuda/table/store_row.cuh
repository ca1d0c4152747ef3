#pragma once

#include "kernels/cuda/device/launch.cuh"

// Stores one f32 key or value in the ring's type, by a warp: the store of count_rows.cu.
namespace kvlm::cuda {

template <class T>
__device__ void convert_row(T* to, int head_dim, const float* from) {
  const auto thread = static_cast<int>(threadIdx.x % 32);
  if (head_dim % 4 == 0 && is_aligned(from, 16) && is_aligned(to, 4 * sizeof(T))) {
    for (int i = 4 * thread; i < head_dim; i += 4 * 32) {
      float x[4];
      load_group<4>(from + i, x);
      store_group<4>(to + i, x);
    }
    return;
  }
  for (int i = thread; i < head_dim; i += 32) to[i] = store_float<T>(from[i]);
}

/// Writes row `row` of `rows` (..., head_dim), by a warp.
__device__ inline void store_row(std::byte* rows, DType dtype, int64_t row, int head_dim,
                                 const float* from) {
  const int64_t first = row * head_dim;
  switch (dtype) {
    case DType::kF16:
      return convert_row(reinterpret_cast<__half*>(rows) + first, head_dim, from);
    case DType::kBF16:
      return convert_row(reinterpret_cast<__nv_bfloat16*>(rows) + first, head_dim, from);
    default:
      return convert_row(reinterpret_cast<float*>(rows) + first, head_dim, from);
  }
}

}  // namespace kvlm::cuda
