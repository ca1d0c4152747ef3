#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_moves.h"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 128;

/// A block a row.
template <class T>
__global__ void widen(const std::byte* const* rows, int dim, float* out) {
  const T* row = reinterpret_cast<const T*>(rows[blockIdx.x]);
  float* to = out + static_cast<int64_t>(blockIdx.x) * dim;
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) to[i] = load_float(row[i]);
}

template <class T>
__global__ void narrow(std::byte* const* rows, int dim, const float* x) {
  T* row = reinterpret_cast<T*>(rows[blockIdx.x]);
  const float* from = x + static_cast<int64_t>(blockIdx.x) * dim;
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) {
    row[i] = store_float<T>(from[i]);
  }
}

}  // namespace

void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream) {
  const auto* on_device = reinterpret_cast<const std::byte* const*>(
      stream.queue().upload(rows.data(), rows.size_bytes()));
  with_type(dtype, [&](auto* type) {
    using T = typename TypeOf<decltype(type)>::Type;
    widen<T>
        <<<static_cast<unsigned>(rows.size()), kThreads, 0, native(stream)>>>(on_device, dim, out);
  });
  check_launch("widen_rows");
}

void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream) {
  const auto* on_device =
      reinterpret_cast<std::byte* const*>(stream.queue().upload(rows.data(), rows.size_bytes()));
  with_type(dtype, [&](auto* type) {
    using T = typename TypeOf<decltype(type)>::Type;
    narrow<T>
        <<<static_cast<unsigned>(rows.size()), kThreads, 0, native(stream)>>>(on_device, dim, x);
  });
  check_launch("narrow_rows");
}

}  // namespace kvlm::cuda
