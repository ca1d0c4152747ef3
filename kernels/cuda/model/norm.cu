#include <algorithm>
#include <type_traits>

#include "kernels/cuda/device/block_reduce.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/model/norm.h"

// RMS and layer norms of rows, a block a row. add_norm also adds one or two products to the
// residual and holds the row in registers between its sum and its output; a row that is too long or
// odd for that is added and normed by launches of their own.
namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

constexpr int kHeldGroups = 4;  // of a row, in registers between its sum and its output

/// kWidth columns a thread, and those kThreads * kWidth further. Weights are asked for before the
/// row is there.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rms_norm_rows(T* y, const float* x, const float* weight, int64_t dim, float eps) {
  __shared__ float warp_sums[kWarps];
  let_next_start();
  const float* row = x + blockIdx.x * dim;
  T* to = y + blockIdx.x * dim;
  const int64_t first = threadIdx.x * kWidth;
  constexpr int64_t kStep = kThreads * kWidth;
  constexpr int64_t kHeld = kStep * kHeldGroups;
  float weights[kHeldGroups][kWidth] = {};
  float held[kHeldGroups][kWidth] = {};
#pragma unroll
  for (int group = 0; group < kHeldGroups; ++group) {
    const int64_t i = first + group * kStep;
    if (i < dim) load_group(weight + i, weights[group]);
  }
  wait_for_earlier();
#pragma unroll
  for (int group = 0; group < kHeldGroups; ++group) {
    const int64_t i = first + group * kStep;
    if (i < dim) load_group(row + i, held[group]);
  }
  float squares = 0;
#pragma unroll
  for (int group = 0; group < kHeldGroups; ++group) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) squares += held[group][j] * held[group][j];
  }
  for (int64_t i = kHeld + first; i < dim; i += kStep) {
    float values[kWidth];
    load_group(row + i, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) squares += values[j] * values[j];
  }
  const float mean = block_reduce<kThreads>(squares, false, warp_sums) / static_cast<float>(dim);
  const float inverse = 1.0f / sqrtf(mean + eps);
  const auto write = [&](int64_t i, float(&values)[kWidth], const float(&of)[kWidth]) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = values[j] * inverse * of[j];
    store_group(to + i, values);
  };
#pragma unroll
  for (int group = 0; group < kHeldGroups; ++group) {
    const int64_t i = first + group * kStep;
    if (i < dim) write(i, held[group], weights[group]);
  }
  for (int64_t i = kHeld + first; i < dim; i += kStep) {
    float values[kWidth], of[kWidth];
    load_group(row + i, values);
    load_group(weight + i, of);
    write(i, values, of);
  }
}

/// Of rows that a block does not hold in registers.
template <class T>
__global__ void __launch_bounds__(kThreads)
    layer_norm_rows(T* y, const float* x, const float* weight, const float* bias, int64_t dim,
                    float eps) {
  __shared__ float warp_sums[kWarps];
  let_next_start();
  wait_for_earlier();
  const float* row = x + blockIdx.x * dim;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) sum += row[i];
  const float mean = block_reduce<kThreads>(sum, false, warp_sums) / static_cast<float>(dim);
  float squares = 0;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    const float d = row[i] - mean;
    squares += d * d;
  }
  const float variance =
      block_reduce<kThreads>(squares, false, warp_sums) / static_cast<float>(dim);
  const float inverse = 1.0f / sqrtf(variance + eps);
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    y[blockIdx.x * dim + i] = store_float<T>((row[i] - mean) * inverse * weight[i] + bias[i]);
  }
}

constexpr int kRowThreads = 128;

constexpr int kMostAddends = 2;

/// What add_norm reads beside x, and its sizes.
struct AddNorm {
  const void* p[kMostAddends];
  const float* p_bias[kMostAddends];  // or null, as scale
  const float* scale[kMostAddends];
  const float* weight;
  const float* bias;  // null: an rms norm
  int dim;
  float eps;
  bool keeps_sum;  // in x
};

/// sum += (p + bias) * scale.
template <int kWidth>
__device__ void add_group(float (&sum)[kWidth], const float (&p)[kWidth], const float* bias,
                          const float* scale) {
  float biases[kWidth] = {}, scales[kWidth];
  if (bias != nullptr) load_group(bias, biases);
  if (scale == nullptr) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] += p[j] + biases[j];
    return;
  }
  load_group(scale, scales);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum[j] = fmaf(p[j] + biases[j], scales[j], sum[j]);
}

/// to = from + (p + bias) * scale, in any number of columns.
template <class P>
__global__ void __launch_bounds__(kThreads)
    add_elements(float* to, const float* from, const P* p, const float* bias, const float* scale,
                 int64_t dim, int64_t count) {
  let_next_start();
  wait_for_earlier();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    const int64_t column = i % dim;
    float sum[1] = {from[i]};
    const float added[1] = {load_float(p[i])};
    add_group(sum, added, bias == nullptr ? nullptr : bias + column,
              scale == nullptr ? nullptr : scale + column);
    to[i] = sum[0];
  }
}

/// y = norm(x + kAddends addends) of row blockIdx.x, which the block holds meanwhile: kGroups
/// groups of kWidth columns a thread. y may be null.
template <class Y, class P, int kWidth, int kGroups, int kAddends>
__global__ void __launch_bounds__(kRowThreads) add_norm_rows(Y* y, float* x, AddNorm args) {
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
    float added[kAddends > 0 ? kAddends : 1][kWidth];
    load_group(x + row + i, held[group]);
#pragma unroll
    for (int a = 0; a < kAddends; ++a) {
      load_group(static_cast<const P*>(args.p[a]) + row + i, added[a]);
    }
#pragma unroll
    for (int a = 0; a < kAddends; ++a) {
      add_group(held[group], added[a], args.p_bias[a] == nullptr ? nullptr : args.p_bias[a] + i,
                args.scale[a] == nullptr ? nullptr : args.scale[a] + i);
    }
    if (args.keeps_sum) store_group(x + row + i, held[group]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += held[group][j];
  }
  if (y == nullptr) return;
  const auto dim = static_cast<float>(args.dim);
  const float mean =
      args.bias == nullptr ? 0.0f : block_reduce<kRowThreads>(sum, false, warp_sums) / dim;
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
  const float inverse =
      1.0f / sqrtf(block_reduce<kRowThreads>(squares, false, warp_sums) / dim + args.eps);
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

/// Columns of the longest row that a block holds.
constexpr int64_t kLongestHeld = int64_t{kRowThreads} * 4 * 8;

template <class Y, class P, int kAddends>
void launch_held(std::string_view op, TensorView y, float* x, int64_t rows, const AddNorm& args,
                 Stream& stream) {
  const auto start = [&](auto kernel) {
    launch_early(op, kernel, static_cast<unsigned>(rows), kRowThreads, stream,
                 reinterpret_cast<Y*>(y.data()), x, args);
  };
  if (args.dim <= kLongestHeld / 4) return start(add_norm_rows<Y, P, 4, 2, kAddends>);
  if (args.dim <= kLongestHeld * 3 / 8) return start(add_norm_rows<Y, P, 4, 3, kAddends>);
  start(add_norm_rows<Y, P, 4, 8, kAddends>);
}

}  // namespace

void rms_norm(TensorView y, ConstTensorView x, ConstTensorView weight, float eps, Stream& stream) {
  const auto rows = static_cast<unsigned>(x.shape()[0]);
  if (rows == 0) return;
  with_type(y.dtype(), [&]<class T>(T*) {
    const auto kernel = in_groups(y, x, weight, {}) ? rms_norm_rows<T, 4> : rms_norm_rows<T, 1>;
    launch_early("rms_norm", kernel, rows, kThreads, stream, reinterpret_cast<T*>(y.data()),
                 x.as<float>(), weight.as<float>(), x.shape()[1], eps);
  });
}

void layer_norm(TensorView y, ConstTensorView x, ConstTensorView weight, ConstTensorView bias,
                float eps, Stream& stream) {
  const auto rows = static_cast<unsigned>(x.shape()[0]);
  if (rows == 0) return;
  const int64_t dim = x.shape()[1];
  const bool held = in_groups(y, x, weight, bias) && dim <= kLongestHeld;
  with_type(y.dtype(), [&]<class T>(T*) {
    if (held) {
      AddNorm args{};
      args.weight = weight.as<float>();
      args.bias = bias.as<float>();
      args.dim = static_cast<int>(dim);
      args.eps = eps;
      // Nothing is added to x, and it is not written.
      return launch_held<T, float, 0>("layer_norm", y, const_cast<float*>(x.as<float>()), rows,
                                      args, stream);
    }
    launch_early("layer_norm", layer_norm_rows<T>, rows, kThreads, stream,
                 reinterpret_cast<T*>(y.data()), x.as<float>(), weight.as<float>(),
                 bias.as<float>(), dim, eps);
  });
}

namespace {

/// add_norm() of rows that a block does not hold: sums first, then their norm.
void add_norm_apart(TensorView y, TensorView x, Residual residual, std::span<const Addend> addends,
                    ConstTensorView weight, ConstTensorView bias, float eps, Stream& stream) {
  TensorView sum = x;
  if (residual == Residual::kSame) {
    sum = TensorView(stream.queue().scratch(kGemmResult, x.bytes()), DType::kF32, x.shape(),
                     x.device());
  }
  const float* from = x.as<float>();
  const int64_t count = x.elements();
  for (const Addend& addend : addends) {
    with_type(addend.p.dtype(), [&]<class P>(P*) {
      launch_early("add_norm", add_elements<P>,
                   static_cast<unsigned>(std::min<int64_t>(ceil_div(count, kThreads), 8192)),
                   kThreads, stream, sum.as<float>(), from,
                   reinterpret_cast<const P*>(addend.p.data()),
                   addend.bias.empty() ? nullptr : addend.bias.as<float>(),
                   addend.scale.empty() ? nullptr : addend.scale.as<float>(), x.shape()[1], count);
    });
    from = sum.as<float>();
  }
  if (y.empty()) return;
  if (bias.empty()) return cuda::rms_norm(y, sum, weight, eps, stream);
  cuda::layer_norm(y, sum, weight, bias, eps, stream);
}

/// Whether addends of one format are read as in_groups().
bool in_groups(std::span<const Addend> addends) {
  return std::ranges::all_of(addends, [&](const Addend& addend) {
    return is_aligned(addend.p.data(), 16) && is_aligned(addend.bias.data(), 16) &&
           is_aligned(addend.scale.data(), 16) && addend.p.dtype() == addends[0].p.dtype();
  });
}

}  // namespace

void add_norm(TensorView y, TensorView x, Residual residual, std::span<const Addend> addends,
              ConstTensorView weight, ConstTensorView bias, float eps, Stream& stream) {
  AddNorm args{};
  for (size_t i = 0; i < addends.size(); ++i) {
    args.p[i] = addends[i].p.data();
    if (!addends[i].bias.empty()) args.p_bias[i] = addends[i].bias.as<float>();
    if (!addends[i].scale.empty()) args.scale[i] = addends[i].scale.as<float>();
  }
  args.weight = weight.empty() ? nullptr : weight.as<float>();
  args.bias = bias.empty() ? nullptr : bias.as<float>();
  args.dim = static_cast<int>(x.shape()[1]);
  args.eps = eps;
  args.keeps_sum = residual == Residual::kSum;
  if (!in_groups(y, x, weight, bias) || !in_groups(addends) || args.dim > kLongestHeld) {
    return add_norm_apart(y, x, residual, addends, weight, bias, eps, stream);
  }
  with_type(y.empty() ? DType::kF32 : y.dtype(), [&]<class Y>(Y*) {
    with_type(addends[0].p.dtype(), [&]<class P>(P*) {
      const auto launch = addends.size() == 1 ? launch_held<Y, P, 1> : launch_held<Y, P, 2>;
      launch("add_norm", y, x.as<float>(), x.shape()[0], args, stream);
    });
  });
}

}  // namespace kvlm::cuda
