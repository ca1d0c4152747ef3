#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/model/elementwise.h"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;

/// Blocks of a grid-stride loop over `count` elements.
unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(count, kThreads), 1, 8192));
}

__device__ int64_t first_element() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ int64_t grid_size() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

/// kWidth elements at a time, as add_elements.
template <class To, class From, int kWidth>
__global__ void convert_elements(To* to, const From* from, int64_t count) {
  let_next_start();
  wait_for_earlier();
  for (int64_t i = first_element() * kWidth; i < count; i += grid_size() * kWidth) {
    float values[kWidth];
    load_group(from + i, values);
    store_group(to + i, values);
  }
}

/// kWidth elements of a row at a time.
template <class T, int kWidth>
__global__ void gather(float* y, const T* table, const int32_t* ids, int64_t dim, int64_t count) {
  let_next_start();
  wait_for_earlier();
  for (int64_t i = first_element() * kWidth; i < count; i += grid_size() * kWidth) {
    float values[kWidth];
    load_group(table + ids[i / dim] * dim + i % dim, values);
    store_group(y + i, values);
  }
}

template <int kWidth>
__global__ void add_elements(float* y, const float* x, int64_t count) {
  let_next_start();
  wait_for_earlier();
  for (int64_t i = first_element() * kWidth; i < count; i += grid_size() * kWidth) {
    float sums[kWidth], values[kWidth];
    load_group(y + i, sums);
    load_group(x + i, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sums[j] += values[j];
    store_group(y + i, sums);
  }
}

__global__ void add_scaled_elements(float* y, const float* x, const float* scale, int64_t dim,
                                    int64_t count) {
  let_next_start();
  wait_for_earlier();
  for (int64_t i = first_element(); i < count; i += grid_size()) {
    y[i] = __fmaf_rn(x[i], scale[i % dim], y[i]);
  }
}

/// Whether elements can be read and written 4 at a time.
bool in_groups(ConstTensorView y, ConstTensorView x) {
  return y.elements() % 4 == 0 && is_aligned(x.data(), 16) && is_aligned(y.data(), 16);
}

}  // namespace

void gather_rows(TensorView y, ConstTensorView table, std::span<const int32_t> ids,
                 Stream& stream) {
  const auto* device_ids =
      reinterpret_cast<const int32_t*>(stream.queue().upload(ids.data(), ids.size_bytes()));
  const int64_t dim = y.shape()[1];
  const bool grouped = dim % 4 == 0 && is_aligned(table.data(), 16) && is_aligned(y.data(), 16);
  with_type(table.dtype(), [&]<class T>(T*) {
    launch_early("gather_rows", grouped ? gather<T, 4> : gather<T, 1>,
                 blocks_for(y.elements() / (grouped ? 4 : 1)), kThreads, stream, y.as<float>(),
                 reinterpret_cast<const T*>(table.data()), device_ids, dim, y.elements());
  });
}

void add(TensorView y, ConstTensorView x, Stream& stream) {
  const bool grouped = in_groups(y, x);
  launch_early("add", grouped ? add_elements<4> : add_elements<1>,
               blocks_for(y.elements() / (grouped ? 4 : 1)), kThreads, stream, y.as<float>(),
               x.as<float>(), y.elements());
}

void add_scaled(TensorView y, ConstTensorView x, ConstTensorView scale, Stream& stream) {
  launch_early("add_scaled", add_scaled_elements, blocks_for(y.elements()), kThreads, stream,
               y.as<float>(), x.as<float>(), scale.as<float>(), y.shape()[1], y.elements());
}

void convert(TensorView y, ConstTensorView x, Stream& stream) {
  const bool grouped = in_groups(y, x);
  with_type(y.dtype(), [&]<class To>(To*) {
    with_type(x.dtype(), [&]<class From>(From*) {
      const auto kernel = grouped ? convert_elements<To, From, 4> : convert_elements<To, From, 1>;
      launch_early("convert", kernel, blocks_for(y.elements() / (grouped ? 4 : 1)), kThreads,
                   stream, reinterpret_cast<To*>(y.data()), reinterpret_cast<const From*>(x.data()),
                   y.elements());
    });
  });
}

}  // namespace kvlm::cuda
