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

/// kGelu to within 4e-7, for results of half precision: two special functions where erff() has
/// branches. Source: Abramowitz & Stegun, 7.1.26.
__device__ inline float gelu_of_halves(float x) {
  const float magnitude = fminf(fabsf(x), 32.0f);  // beyond it, infinity too, nothing is missing
  float t;
  asm("rcp.approx.ftz.f32 %0, %1;"
      : "=f"(t)
      : "f"(fmaf(0.3275911f * 0.70710678f, magnitude, 1.0f)));
  float bell;  // exp(-x^2 / 2)
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(bell) : "f"(magnitude * magnitude * -0.72134752f));
  constexpr float kHalf[] = {0.127414796f, -0.142248368f, 0.7107068705f, -0.7265760135f,
                             0.5307027145f};
  float sum = kHalf[4];
#pragma unroll
  for (int i = 3; i >= 0; --i) sum = fmaf(sum, t, kHalf[i]);
  const float missing = magnitude * sum * t * bell;  // of x, or of 0 where x is negative
  return x < 0 ? -missing : x - missing;
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
