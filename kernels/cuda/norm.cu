#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/norm.h"

// RMS and layer norms of rows, a block a row. add_norm also adds a product to the residual and
// holds the row in registers between its sum and its output; a row that is too long or odd for that
// is added and normed by two launches.
namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// The sum over a block, in every thread. `warp_sums` (kWarps,) is free again after the next
/// barrier.
__device__ float block_sum(float x, float* warp_sums) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += warp_sums[i];
  return sum;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rms_norm_rows(T* y, const float* x, const float* weight, int64_t dim, float eps) {
  __shared__ float warp_sums[kWarps];
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
  const float mean = block_sum(squares, warp_sums) / static_cast<float>(dim);
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
  __shared__ float warp_sums[kWarps];
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
  const float mean = block_sum(sum, warp_sums) / static_cast<float>(dim);
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
  const float variance = block_sum(squares, warp_sums) / static_cast<float>(dim);
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

constexpr int kRowThreads = 128;

/// What add_norm reads beside its rows.
struct AddNorm {
  const float* scale;  // or null
  const float* weight;
  const float* bias;  // null: an rms norm
  int dim;
  float eps;
};

/// The sum over kRowThreads threads, in every one; `warp_sums` as block_sum().
__device__ float row_sum(float x, float* warp_sums) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kRowThreads / 32; ++i) sum += warp_sums[i];
  return sum;
}

/// x += p * scale and y = norm(x) of row blockIdx.x, which the block holds meanwhile: kGroups
/// groups of kWidth columns a thread. y may be null.
template <class Y, class P, int kWidth, int kGroups>
__global__ void __launch_bounds__(kRowThreads)
    add_norm_rows(Y* y, float* x, const P* p, AddNorm args) {
  __shared__ float warp_sums[kRowThreads / 32];
  let_next_start();
  const int first = static_cast<int>(threadIdx.x) * kWidth;
  constexpr int kStep = kRowThreads * kWidth;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * args.dim;
  wait_for_earlier();
  float held[kGroups][kWidth];
  float sum = 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int i = first + group * kStep;
    if (i >= args.dim) continue;
    float added[kWidth];
    load_group(x + row + i, held[group]);
    load_group(p + row + i, added);
    if (args.scale != nullptr) {
      float scales[kWidth];
      load_group(args.scale + i, scales);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) held[group][j] = fmaf(added[j], scales[j], held[group][j]);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) held[group][j] += added[j];
    }
    store_group(x + row + i, held[group]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += held[group][j];
  }
  if (y == nullptr) return;
  const auto dim = static_cast<float>(args.dim);
  const float mean = args.bias == nullptr ? 0.0f : row_sum(sum, warp_sums) / dim;
  float squares = 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (first + group * kStep >= args.dim) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float d = held[group][j] - mean;
      squares += d * d;
    }
  }
  const float inverse = 1.0f / sqrtf(row_sum(squares, warp_sums) / dim + args.eps);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int i = first + group * kStep;
    if (i >= args.dim) continue;
    float weights[kWidth], biases[kWidth] = {};
    load_group(args.weight + i, weights);
    if (args.bias != nullptr) load_group(args.bias + i, biases);
    float values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      values[j] = (held[group][j] - mean) * inverse * weights[j] + biases[j];
    }
    store_group(y + row + i, values);
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

void add_norm(TensorView y, TensorView x, ConstTensorView p, ConstTensorView scale,
              ConstTensorView weight, ConstTensorView bias, float eps, Stream& stream) {
  const int64_t dim = x.shape()[1];
  const AddNorm args{scale.empty() ? nullptr : scale.as<float>(),
                     weight.empty() ? nullptr : weight.as<float>(),
                     bias.empty() ? nullptr : bias.as<float>(), static_cast<int>(dim), eps};
  const bool grouped =
      in_groups(y, x, weight, bias) && is_aligned(p.data(), 16) && is_aligned(args.scale, 16);
  constexpr int64_t kMost = int64_t{kRowThreads} * 4 * 8;
  if (!grouped || dim > kMost) {  // rows that a block does not hold
    if (p.dtype() != DType::kF32) {
      std::byte* wide =
          stream.queue().scratch(kGemmOperand, static_cast<size_t>(p.elements()) * sizeof(float));
      const TensorView floats(wide, DType::kF32, p.shape(), p.device());
      convert(floats, p, stream);
      p = floats;
    }
    if (scale.empty()) {
      add(x, p, stream);
    } else {
      add_scaled(x, p, scale, stream);
    }
    if (y.empty()) return;
    if (bias.empty()) return rms_norm(y, x, weight, eps, stream);
    return layer_norm(y, x, weight, bias, eps, stream);
  }
  const auto rows = static_cast<unsigned>(x.shape()[0]);
  with_type(y.empty() ? DType::kF32 : y.dtype(), [&](auto* to) {
    using Y = typename TypeOf<decltype(to)>::Type;
    with_type(p.dtype(), [&](auto* from) {
      using P = typename TypeOf<decltype(from)>::Type;
      const auto start = [&](auto kernel) {
        launch_early("add_norm", kernel, rows, kRowThreads, stream, reinterpret_cast<Y*>(y.data()),
                     x.as<float>(), reinterpret_cast<const P*>(p.data()), args);
      };
      if (dim <= kMost / 4) return start(add_norm_rows<Y, P, 4, 2>);
      if (dim <= kMost * 3 / 8) return start(add_norm_rows<Y, P, 4, 3>);
      start(add_norm_rows<Y, P, 4, 8>);
    });
  });
}

}  // namespace kvlm::cuda
