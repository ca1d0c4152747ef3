#pragma once

#include "kernels/activation.h"

// The formulas of kernels/activation.h on a GPU.
namespace kvlm::cuda {

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <Activation kKind>
__device__ inline float activated(float x) {
  if constexpr (kKind == Activation::kQuickGelu) return x * sigmoid(1.702f * x);
  if constexpr (kKind == Activation::kGelu) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  if constexpr (kKind == Activation::kGeluTanh) {
    return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  }
  return x * sigmoid(x);
}

__device__ inline float activated(Activation kind, float x) {
  switch (kind) {
    case Activation::kQuickGelu:
      return activated<Activation::kQuickGelu>(x);
    case Activation::kGelu:
      return activated<Activation::kGelu>(x);
    case Activation::kGeluTanh:
      return activated<Activation::kGeluTanh>(x);
    default:
      return activated<Activation::kSilu>(x);
  }
}

}  // namespace kvlm::cuda
