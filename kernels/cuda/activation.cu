#include <algorithm>

#include "kernels/cuda/activation.h"
#include "kernels/cuda/launch.cuh"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <Activation kKind>
__device__ float apply(float x) {
  if constexpr (kKind == Activation::kQuickGelu) return x * sigmoid(1.702f * x);
  if constexpr (kKind == Activation::kGelu) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  if constexpr (kKind == Activation::kGeluTanh) {
    return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  }
  return x * sigmoid(x);
}

/// x = activation(x), times `up` where there is one.
template <Activation kKind>
__global__ void activate_elements(float* x, const float* up, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    const float y = apply<kKind>(x[i]);
    x[i] = up != nullptr ? y * up[i] : y;
  }
}

template <Activation kKind>
void launch(float* x, const float* up, int64_t count, Stream& stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(count, kThreads), 8192));
  activate_elements<kKind><<<blocks, kThreads, 0, native(stream)>>>(x, up, count);
  check_launch("activate");
}

void launch(Activation activation, float* x, const float* up, int64_t count, Stream& stream) {
  if (count == 0) return;
  switch (activation) {
    case Activation::kQuickGelu:
      return launch<Activation::kQuickGelu>(x, up, count, stream);
    case Activation::kGelu:
      return launch<Activation::kGelu>(x, up, count, stream);
    case Activation::kGeluTanh:
      return launch<Activation::kGeluTanh>(x, up, count, stream);
    case Activation::kSilu:
      return launch<Activation::kSilu>(x, up, count, stream);
  }
}

}  // namespace

void activate(TensorView x, Activation activation, Stream& stream) {
  launch(activation, x.as<float>(), nullptr, x.elements(), stream);
}

void activate_gate(TensorView gate, ConstTensorView up, Activation activation, Stream& stream) {
  launch(activation, gate.as<float>(), up.as<float>(), gate.elements(), stream);
}

}  // namespace kvlm::cuda
