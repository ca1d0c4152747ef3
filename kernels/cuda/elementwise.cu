#include <algorithm>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.cuh"

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

template <class To, class From>
__global__ void convert_elements(To* to, const From* from, int64_t count) {
  for (int64_t i = first_element(); i < count; i += grid_size()) {
    to[i] = store_float<To>(load_float(from[i]));
  }
}

template <class T>
__global__ void gather(float* y, const T* table, const int32_t* ids, int64_t dim, int64_t count) {
  for (int64_t i = first_element(); i < count; i += grid_size()) {
    y[i] = load_float(table[ids[i / dim] * dim + i % dim]);
  }
}

__global__ void add_elements(float* y, const float* x, int64_t count) {
  for (int64_t i = first_element(); i < count; i += grid_size()) y[i] += x[i];
}

__global__ void place_columns(float* y, const float* x, int64_t width, int64_t columns,
                              int64_t count) {
  for (int64_t i = first_element(); i < count; i += grid_size()) {
    y[i / columns * width + i % columns] = x[i];
  }
}

}  // namespace

void gather_rows(TensorView y, ConstTensorView table, std::span<const int32_t> ids,
                 Stream& stream) {
  const auto* device_ids =
      reinterpret_cast<const int32_t*>(stream.queue().upload(ids.data(), ids.size_bytes()));
  with_type(table.dtype(), [&](auto* type) {
    using T = typename TypeOf<decltype(type)>::Type;
    gather<<<blocks_for(y.elements()), kThreads, 0, native(stream)>>>(
        y.as<float>(), reinterpret_cast<const T*>(table.data()), device_ids, y.shape()[1],
        y.elements());
  });
  check_launch("gather_rows");
}

void copy_columns(TensorView y, int64_t first, ConstTensorView x, Stream& stream) {
  place_columns<<<blocks_for(x.elements()), kThreads, 0, native(stream)>>>(
      y.as<float>() + first, x.as<float>(), y.shape()[1], x.shape()[1], x.elements());
  check_launch("copy_columns");
}

void add(TensorView y, ConstTensorView x, Stream& stream) {
  add_elements<<<blocks_for(y.elements()), kThreads, 0, native(stream)>>>(
      y.as<float>(), x.as<float>(), y.elements());
  check_launch("add");
}

void convert(TensorView y, ConstTensorView x, Stream& stream) {
  with_type(y.dtype(), [&](auto* to) {
    using To = typename TypeOf<decltype(to)>::Type;
    with_type(x.dtype(), [&](auto* from) {
      using From = typename TypeOf<decltype(from)>::Type;
      convert_elements<<<blocks_for(y.elements()), kThreads, 0, native(stream)>>>(
          reinterpret_cast<To*>(y.data()), reinterpret_cast<const From*>(x.data()), y.elements());
    });
  });
  check_launch("convert");
}

}  // namespace kvlm::cuda
