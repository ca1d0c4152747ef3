#include <algorithm>
#include <type_traits>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/model/activation.cuh"
#include "kernels/cuda/model/activation.h"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;

/// y = activation(x), times `up` where there is one; kWidth elements at a time.
template <Activation kKind, class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    activate_elements(T* y, const float* x, const float* up, int64_t count) {
  let_next_start();
  wait_for_earlier();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kWidth;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth; i < count;
       i += step) {
    float values[kWidth];
    load_group(x + i, values);
#pragma unroll
    for (float& value : values) value = activated<kKind>(value);
    if (up != nullptr) {
      float factors[kWidth];
      load_group(up + i, factors);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] *= factors[j];
    }
    store_group(y + i, values);
  }
}

/// y = activation(x), eight halves a thread. The last come first: they were written last, so that
/// the cache still has them, and what reads y from its beginning finds that there.
template <Activation kKind, class T>
__global__ void __launch_bounds__(kThreads) activate_halves(T* y, const T* x, int64_t groups) {
  let_next_start();
  wait_for_earlier();
  const int64_t group = groups - 1 - (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  if (group < 0) return;
  const uint4 read = reinterpret_cast<const uint4*>(x)[group];
  const T* values = reinterpret_cast<const T*>(&read);
  alignas(16) T results[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float value = load_float(values[i]);
    results[i] = store_float<T>(kKind == Activation::kGelu ? gelu_of_halves<T>(value)
                                                           : activated<kKind>(value));
  }
  reinterpret_cast<uint4*>(y)[group] = *reinterpret_cast<const uint4*>(results);
}

/// Calls `body` with an integral constant of `activation`.
template <class Body>
void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::kQuickGelu:
      return body(std::integral_constant<Activation, Activation::kQuickGelu>());
    case Activation::kGelu:
      return body(std::integral_constant<Activation, Activation::kGelu>());
    case Activation::kGeluTanh:
      return body(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kSilu:
      return body(std::integral_constant<Activation, Activation::kSilu>());
  }
}

template <Activation kKind>
void launch(TensorView y, ConstTensorView x, const float* up, Stream& stream) {
  const int64_t count = x.elements();
  const bool grouped =
      count % 4 == 0 && is_aligned(x.data(), 16) && is_aligned(y.data(), 16) && is_aligned(up, 16);
  const int64_t blocks = ceil_div(count, kThreads * (grouped ? 4 : 1));
  with_type(y.dtype(), [&]<class T>(T*) {
    const auto kernel = grouped ? activate_elements<kKind, T, 4> : activate_elements<kKind, T, 1>;
    launch_early("activate", kernel, static_cast<unsigned>(std::min<int64_t>(blocks, 8192)),
                 kThreads, stream, reinterpret_cast<T*>(y.data()), x.as<float>(), up, count);
  });
}

void launch(Activation activation, TensorView y, ConstTensorView x, const float* up,
            Stream& stream) {
  if (x.elements() == 0) return;
  with_activation(activation, [&](auto kind) { launch<kind()>(y, x, up, stream); });
}

}  // namespace

void activate(TensorView y, ConstTensorView x, Activation activation, Stream& stream) {
  launch(activation, y, x, nullptr, stream);
}

void activate_halves(TensorView y, ConstTensorView x, Activation activation, Stream& stream) {
  const int64_t groups = x.elements() / 8;
  if (groups == 0) return;
  with_activation(activation, [&](auto kind) {
    const auto start = [&]<class T>(T*) {
      launch_early("activate", activate_halves<kind(), T>,
                   static_cast<unsigned>(ceil_div(groups, kThreads)), kThreads, stream,
                   reinterpret_cast<T*>(y.data()), reinterpret_cast<const T*>(x.data()), groups);
    };
    if (x.dtype() == DType::kF16) return start(static_cast<__half*>(nullptr));
    start(static_cast<__nv_bfloat16*>(nullptr));
  });
}

void activate_gate(TensorView y, ConstTensorView gate, ConstTensorView up, Activation activation,
                   Stream& stream) {
  launch(activation, y, gate, up.as<float>(), stream);
}

}  // namespace kvlm::cuda
