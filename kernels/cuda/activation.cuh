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

/// kGelu for results of T, half precision, to within 1e-7 (bf16: 3.4e-6) beside the rounding of
/// float arithmetic: two special functions where erff() has branches. x times the normal
/// distribution's P(x), where log2(P(-x) / P(x)) is x times a polynomial of x^2, fitted for the
/// least largest error of the result.
template <class T>
__device__ inline float gelu_of_halves(float x) {
  constexpr bool kFine = std::is_same_v<T, __half>;
  constexpr float kOfSeven[] = {-2.30220723f,    -0.104838580f,  9.55924043e-5f, 1.59389572e-4f,
                                -1.14524510e-5f, 3.85046292e-7f, -5.20993781e-9f};
  constexpr float kOfFive[] = {-2.30204368f, -0.105229974f, 3.62046965e-4f, 8.79099243e-5f,
                               -3.21038692e-6f};
  constexpr int kLast = kFine ? 6 : 4;
  const auto term = [](int i) { return kFine ? kOfSeven[i] : kOfFive[i % 5]; };
  float bounded;  // nothing is left of what is below, but minus infinity times 0 would be no number
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(bounded) : "f"(x), "f"(-20.0f));
  const float square = bounded * bounded;
  float sum = term(kLast);
#pragma unroll
  for (int i = kLast - 1; i >= 0; --i) sum = fmaf(sum, square, term(i));
  float odds;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(odds) : "f"(bounded * sum));
  float part;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(1.0f + odds));
  return bounded * part;
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
