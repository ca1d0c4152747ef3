#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rope.h"

namespace kvlm::cuda {

namespace {

__global__ void rotate_rows(float* x, const float* cos, const float* sin, int heads, int head_dim,
                            int half, int64_t pairs) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= pairs) return;
  const auto channel = static_cast<int>(i % half);
  const int64_t head = i / half;  // of all rows
  const int64_t row = head / heads;
  float* low = x + head * head_dim + channel;
  float* high = low + half;
  const float c = cos[row * half + channel];
  const float s = sin[row * half + channel];
  const float a = *low;
  const float b = *high;
  *low = a * c - b * s;
  *high = b * c + a * s;
}

}  // namespace

void rotate(TensorView x, ConstTensorView cos, ConstTensorView sin, Stream& stream) {
  constexpr int kThreads = 256;
  const auto half = static_cast<int>(cos.shape()[1]);
  const int64_t pairs = x.shape()[0] * x.shape()[1] * half;
  if (pairs == 0) return;
  rotate_rows<<<static_cast<unsigned>(ceil_div(pairs, kThreads)), kThreads, 0, native(stream)>>>(
      x.as<float>(), cos.as<float>(), sin.as<float>(), static_cast<int>(x.shape()[1]),
      static_cast<int>(x.shape()[2]), half, pairs);
  check_launch("rotate");
}

}  // namespace kvlm::cuda
