#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/importance/blend_rows.h"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;

/// kWidth columns of a row at a time; `count` is of such groups.
template <int kWidth>
__global__ void blend(float* y, const float* x, const int32_t* indices, const float* weights,
                      int terms, int64_t groups_each, int64_t count) {
  let_next_start();
  wait_for_earlier();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    const int64_t first_term = i / groups_each * terms;
    const int64_t group = i % groups_each;
    float sums[kWidth] = {};
    for (int term = 0; term < terms; ++term) {
      const float weight = weights[first_term + term];
      float values[kWidth];
      load_group(x + (indices[first_term + term] * groups_each + group) * kWidth, values);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float product = weight * values[j];
        sums[j] = term == 0 ? product : sums[j] + product;  // -0 stays what it is
      }
    }
    store_group(y + i * kWidth, sums);
  }
}

}  // namespace

void blend_rows(TensorView y, ConstTensorView x, const RowBlend& rows, Stream& stream) {
  const size_t bytes = rows.indices.size() * sizeof(int32_t);
  const UploadRange ranges[] = {{rows.indices.data(), bytes, 0},
                                {rows.weights.data(), bytes, bytes}};
  const std::byte* uploaded = stream.queue().upload_ranges(ranges, 2 * bytes);
  const auto* indices = reinterpret_cast<const int32_t*>(uploaded);
  const auto* weights = reinterpret_cast<const float*>(uploaded + bytes);
  const int64_t dim = x.shape()[1];
  const bool grouped = dim % 4 == 0 && is_aligned(x.data(), 16) && is_aligned(y.data(), 16);
  const int64_t groups_each = dim / (grouped ? 4 : 1);
  const int64_t count = y.shape()[0] * groups_each;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(count, kThreads), 8192));
  launch_early("blend_rows", grouped ? blend<4> : blend<1>, blocks, kThreads, stream, y.as<float>(),
               x.as<float>(), indices, weights, rows.terms, groups_each, count);
}

}  // namespace kvlm::cuda
