#pragma once

#include <cuda_fp16.h>

#include <type_traits>

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

/// kGelu for results of T, half precision, to within 6e-8 (bf16: 5e-7) beside the rounding of float
/// arithmetic: max(x, 0) - |x| P(-|x|), with P the normal distribution's. log2(P(-a)) is a
/// polynomial of a, fitted for the least largest error of the result, so that one special function
/// does where erff() has branches.
template <class T>
__device__ inline float gelu_of_halves(float x) {
  constexpr bool kFine = std::is_same_v<T, __half>;
  constexpr float kOfSix[] = {-0.999993086f,  -1.15120173f,     -0.458770961f, -0.0534121096f,
                              0.00808071904f, -0.000769220467f, 3.3092907e-05f};
  constexpr float kOfFive[] = {-1.00003767f,   -1.15078771f,   -0.459992647f,
                               -0.0518271662f, 0.00708446093f, -0.000473294f};
  constexpr int kLast = kFine ? 6 : 5;
  const auto term = [](int i) { return kFine ? kOfSix[i] : kOfFive[i % 6]; };
  // Nothing is left beyond, but infinity times 0 would be no number.
  const float size = fminf(fabsf(x), kFine ? 10.0f : 20.0f);
  float sum = term(kLast);
#pragma unroll
  for (int i = kLast - 1; i >= 0; --i) sum = fmaf(sum, size, term(i));
  float beyond;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(beyond) : "f"(sum));
  float positive;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(positive) : "f"(x), "f"(0.0f));
  return fmaf(-size, beyond, positive);
}

/// kSilu for results of half precision: within 5e-6 of its size, and 0 below -87.
__device__ inline float silu_of_halves(float x) { return __fdividef(x, 1 + __expf(-x)); }

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
