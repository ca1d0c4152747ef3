#pragma once

#include "kernels/cuda/device/launch.cuh"

namespace kvlm::cuda {

/// Turns kWidth pairs of channels, low[j] and high[j], by angles of these cosines and sines (RoPE).
template <int kWidth, class T>
__device__ __forceinline__ void turn_pairs(T* low, T* high, const float* cos, const float* sin) {
  float a[kWidth], b[kWidth], c[kWidth], s[kWidth];
  load_group(low, a);
  load_group(high, b);
  load_group(cos, c);
  load_group(sin, s);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float turned = a[j] * c[j] - b[j] * s[j];
    b[j] = b[j] * c[j] + a[j] * s[j];
    a[j] = turned;
  }
  store_group(low, a);
  store_group(high, b);
}

}  // namespace kvlm::cuda
