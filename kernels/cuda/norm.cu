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

__global__ void rms_norm_rows(float* y, const float* x, const float* weight, int64_t dim,
                              float eps) {
  __shared__ float parts[kWarps];
  const float* row = x + blockIdx.x * dim;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) squares += row[i] * row[i];
  const float mean = block_sum(squares, parts) / static_cast<float>(dim);
  const float inverse = 1.0f / sqrtf(mean + eps);
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    y[blockIdx.x * dim + i] = row[i] * inverse * weight[i];
  }
}

__global__ void layer_norm_rows(float* y, const float* x, const float* weight, const float* bias,
                                int64_t dim, float eps) {
  __shared__ float parts[kWarps];
  const float* row = x + blockIdx.x * dim;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) sum += row[i];
  const float mean = block_sum(sum, parts) / static_cast<float>(dim);
  float squares = 0;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    const float d = row[i] - mean;
    squares += d * d;
  }
  const float variance = block_sum(squares, parts) / static_cast<float>(dim);
  const float inverse = 1.0f / sqrtf(variance + eps);
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    y[blockIdx.x * dim + i] = (row[i] - mean) * inverse * weight[i] + bias[i];
  }
}

}  // namespace

void rms_norm(TensorView y, ConstTensorView x, ConstTensorView weight, float eps, Stream& stream) {
  const auto rows = static_cast<unsigned>(x.shape()[0]);
  if (rows == 0) return;
  rms_norm_rows<<<rows, kThreads, 0, native(stream)>>>(y.as<float>(), x.as<float>(),
                                                       weight.as<float>(), x.shape()[1], eps);
  check_launch("rms_norm");
}

void layer_norm(TensorView y, ConstTensorView x, ConstTensorView weight, ConstTensorView bias,
                float eps, Stream& stream) {
  const auto rows = static_cast<unsigned>(x.shape()[0]);
  if (rows == 0) return;
  layer_norm_rows<<<rows, kThreads, 0, native(stream)>>>(
      y.as<float>(), x.as<float>(), weight.as<float>(), bias.as<float>(), x.shape()[1], eps);
  check_launch("layer_norm");
}

}  // namespace kvlm::cuda
