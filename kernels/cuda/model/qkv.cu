#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/model/qkv.h"
#include "kernels/cuda/model/turn_pairs.cuh"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// Row blockIdx.x: its queries (blockIdx.y 0) or keys (1), `width` elements.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    norm_rows(T* qkv, const float* q_weight, const float* k_weight, int width, float eps) {
  __shared__ float warp_sums[kWarps];
  let_next_start();
  wait_for_earlier();
  T* row = qkv + (static_cast<int64_t>(blockIdx.x) * 3 + blockIdx.y) * width;
  const float* weight = blockIdx.y == 0 ? q_weight : k_weight;
  const int first = static_cast<int>(threadIdx.x) * kWidth;
  float squares = 0;
  for (int i = first; i < width; i += kThreads * kWidth) {
    float values[kWidth];
    load_group(row + i, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) squares += values[j] * values[j];
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += warp_sums[i];
  const float inverse = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
  for (int i = first; i < width; i += kThreads * kWidth) {
    float values[kWidth], weights[kWidth];
    load_group(row + i, values);
    load_group(weight + i, weights);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = values[j] * inverse * weights[j];
    store_group(row + i, values);
  }
}

/// Row blockIdx.x, of which `heads` heads of queries and keys lie side by side: kWidth pairs of
/// channels a thread.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rotate_rows(T* qkv, const float* cos, const float* sin, int heads, int half) {
  let_next_start();
  wait_for_earlier();
  const int64_t row = blockIdx.x;
  const int groups = half / kWidth;
  T* from = qkv + row * (heads / 2 * 3) * (2 * half);
  for (int i = static_cast<int>(threadIdx.x); i < heads * groups; i += kThreads) {
    const int channel = i % groups * kWidth;
    T* low = from + i / groups * (2 * half) + channel;
    turn_pairs<kWidth>(low, low + half, cos + row * half + channel, sin + row * half + channel);
  }
}

}  // namespace

void norm_queries_and_keys(TensorView qkv, ConstTensorView q_weight, ConstTensorView k_weight,
                           float eps, Stream& stream) {
  const auto width = static_cast<int>(qkv.shape()[2] * qkv.shape()[3]);
  const bool grouped = width % 4 == 0 && is_aligned(qkv.data(), 8) &&
                       is_aligned(q_weight.data(), 16) && is_aligned(k_weight.data(), 16);
  const dim3 grid(static_cast<unsigned>(qkv.shape()[0]), 2);
  with_type(qkv.dtype(), [&]<class T>(T*) {
    launch_early("norm_queries_and_keys", grouped ? norm_rows<T, 4> : norm_rows<T, 1>, grid,
                 kThreads, stream, reinterpret_cast<T*>(qkv.data()), q_weight.as<float>(),
                 k_weight.as<float>(), width, eps);
  });
}

void rotate_queries_and_keys(TensorView qkv, ConstTensorView cos, ConstTensorView sin,
                             Stream& stream) {
  const auto heads = static_cast<int>(2 * qkv.shape()[2]);
  const auto half = static_cast<int>(qkv.shape()[3] / 2);
  const bool grouped = half % 4 == 0 && is_aligned(qkv.data(), 8) && is_aligned(cos.data(), 16) &&
                       is_aligned(sin.data(), 16);
  with_type(qkv.dtype(), [&]<class T>(T*) {
    launch_early("rotate_queries_and_keys", grouped ? rotate_rows<T, 4> : rotate_rows<T, 1>,
                 static_cast<unsigned>(qkv.shape()[0]), kThreads, stream,
                 reinterpret_cast<T*>(qkv.data()), cos.as<float>(), sin.as<float>(), heads, half);
  });
}

}  // namespace kvlm::cuda
