#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/norm.h"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// The sum over a block, in every thread. `parts` (kWarps,) is free again after the next barrier.
__device__ float block_sum(float x, float* parts) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += parts[i];
  return sum;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rms_norm_rows(T* y, const float* x, const float* weight, int64_t dim, float eps) {
  __shared__ float parts[kWarps];
  let_next_start();
  wait_for_earlier();
  const float* row = x + blockIdx.x * dim;
  const int64_t first = threadIdx.x * kWidth;
  float squares = 0;
  for (int64_t i = first; i < dim; i += kThreads * kWidth) {
    float values[kWidth];
    load_group(row + i, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) squares += values[j] * values[j];
  }
  const float mean = block_sum(squares, parts) / static_cast<float>(dim);
  const float inverse = 1.0f / sqrtf(mean + eps);
  for (int64_t i = first; i < dim; i += kThreads * kWidth) {
    float values[kWidth], weights[kWidth];
    load_group(row + i, values);
    load_group(weight + i, weights);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = values[j] * inverse * weights[j];
    store_group(y + blockIdx.x * dim + i, values);
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    layer_norm_rows(T* y, const float* x, const float* weight, const float* bias, int64_t dim,
                    float eps) {
  __shared__ float parts[kWarps];
  let_next_start();
  wait_for_earlier();
  const float* row = x + blockIdx.x * dim;
  const int64_t first = threadIdx.x * kWidth;
  float sum = 0;
  for (int64_t i = first; i < dim; i += kThreads * kWidth) {
    float values[kWidth];
    load_group(row + i, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += values[j];
  }
  const float mean = block_sum(sum, parts) / static_cast<float>(dim);
  float squares = 0;
  for (int64_t i = first; i < dim; i += kThreads * kWidth) {
    float values[kWidth];
    load_group(row + i, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float d = values[j] - mean;
      squares += d * d;
    }
  }
  const float variance = block_sum(squares, parts) / static_cast<float>(dim);
  const float inverse = 1.0f / sqrtf(variance + eps);
  for (int64_t i = first; i < dim; i += kThreads * kWidth) {
    float values[kWidth], weights[kWidth], biases[kWidth];
    load_group(row + i, values);
    load_group(weight + i, weights);
    load_group(bias + i, biases);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      values[j] = (values[j] - mean) * inverse * weights[j] + biases[j];
    }
    store_group(y + blockIdx.x * dim + i, values);
  }
}

/// Whether every row can be read and written 4 elements at a time.
bool in_groups(ConstTensorView y, ConstTensorView x, ConstTensorView weight, ConstTensorView bias) {
  return x.shape()[1] % 4 == 0 && is_aligned(x.data(), 16) && is_aligned(y.data(), 16) &&
         is_aligned(weight.data(), 16) && is_aligned(bias.data(), 16);
}

}  // namespace

void rms_norm(TensorView y, ConstTensorView x, ConstTensorView weight, float eps, Stream& stream) {
  const auto rows = static_cast<unsigned>(x.shape()[0]);
  if (rows == 0) return;
  with_type(y.dtype(), [&](auto* type) {
    using T = typename TypeOf<decltype(type)>::Type;
    const auto kernel = in_groups(y, x, weight, {}) ? rms_norm_rows<T, 4> : rms_norm_rows<T, 1>;
    launch_early("rms_norm", kernel, rows, kThreads, stream, reinterpret_cast<T*>(y.data()),
                 x.as<float>(), weight.as<float>(), x.shape()[1], eps);
  });
}

void layer_norm(TensorView y, ConstTensorView x, ConstTensorView weight, ConstTensorView bias,
                float eps, Stream& stream) {
  const auto rows = static_cast<unsigned>(x.shape()[0]);
  if (rows == 0) return;
  with_type(y.dtype(), [&](auto* type) {
    using T = typename TypeOf<decltype(type)>::Type;
    const auto kernel =
        in_groups(y, x, weight, bias) ? layer_norm_rows<T, 4> : layer_norm_rows<T, 1>;
    launch_early("layer_norm", kernel, rows, kThreads, stream, reinterpret_cast<T*>(y.data()),
                 x.as<float>(), weight.as<float>(), bias.as<float>(), x.shape()[1], eps);
  });
}

}  // namespace kvlm::cuda
