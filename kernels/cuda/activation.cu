#include <algorithm>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/activation.h"
#include "kernels/cuda/launch.cuh"

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

template <Activation kKind>
void launch(TensorView y, ConstTensorView x, const float* up, Stream& stream) {
  const int64_t count = x.elements();
  const bool grouped =
      count % 4 == 0 && is_aligned(x.data(), 16) && is_aligned(y.data(), 16) && is_aligned(up, 16);
  const int64_t blocks = ceil_div(count, kThreads * (grouped ? 4 : 1));
  with_type(y.dtype(), [&](auto* type) {
    using T = typename TypeOf<decltype(type)>::Type;
    const auto kernel = grouped ? activate_elements<kKind, T, 4> : activate_elements<kKind, T, 1>;
    launch_early("activate", kernel, static_cast<unsigned>(std::min<int64_t>(blocks, 8192)),
                 kThreads, stream, reinterpret_cast<T*>(y.data()), x.as<float>(), up, count);
  });
}

void launch(Activation activation, TensorView y, ConstTensorView x, const float* up,
            Stream& stream) {
  if (x.elements() == 0) return;
  switch (activation) {
    case Activation::kQuickGelu:
      return launch<Activation::kQuickGelu>(y, x, up, stream);
    case Activation::kGelu:
      return launch<Activation::kGelu>(y, x, up, stream);
    case Activation::kGeluTanh:
      return launch<Activation::kGeluTanh>(y, x, up, stream);
    case Activation::kSilu:
      return launch<Activation::kSilu>(y, x, up, stream);
  }
}

}  // namespace

void activate(TensorView y, ConstTensorView x, Activation activation, Stream& stream) {
  launch(activation, y, x, nullptr, stream);
}

void activate_gate(TensorView y, ConstTensorView gate, ConstTensorView up, Activation activation,
                   Stream& stream) {
  launch(activation, y, gate, up.as<float>(), stream);
}

}  // namespace kvlm::cuda
