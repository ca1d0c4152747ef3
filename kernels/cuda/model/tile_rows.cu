#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/model/tile_rows.h"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;

/// Row blockIdx.x of x, kWidth channels at a time.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    scatter_rows(float* x, const float* patches, const float* class_token, const float* positions,
                 int64_t in_tile, int64_t dim) {
  let_next_start();
  wait_for_earlier();
  const int64_t row = blockIdx.x;
  const int64_t tile = row / in_tile;
  const int64_t place = row % in_tile;
  const int64_t first = class_token == nullptr ? 0 : 1;
  const float* from =
      place < first ? class_token : patches + (tile * (in_tile - first) + place - first) * dim;
  for (int64_t i = threadIdx.x * kWidth; i < dim; i += kThreads * kWidth) {
    float values[kWidth], added[kWidth];
    load_group(from + i, values);
    load_group(positions + place * dim + i, added);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] += added[j];
    store_group(x + row * dim + i, values);
  }
}

/// Row blockIdx.x of y.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    take_rows(float* y, const float* x, int64_t width, int64_t dim, int64_t rows_per_tile,
              int64_t skipped) {
  let_next_start();
  wait_for_earlier();
  const int64_t kept = rows_per_tile - skipped;
  const int64_t row = blockIdx.x;
  const float* from = x + (row / kept * rows_per_tile + skipped + row % kept) * dim;
  for (int64_t i = threadIdx.x * kWidth; i < dim; i += kThreads * kWidth) {
    float values[kWidth];
    load_group(from + i, values);
    store_group(y + row * width + i, values);
  }
}

}  // namespace

void scatter_tiles(TensorView x, ConstTensorView patches, ConstTensorView class_token,
                   ConstTensorView positions, Stream& stream) {
  const int64_t dim = x.shape()[1];
  const float* first = class_token.empty() ? nullptr : class_token.as<float>();
  const bool grouped = dim % 4 == 0 && is_aligned(x.data(), 16) && is_aligned(patches.data(), 16) &&
                       is_aligned(first, 16) && is_aligned(positions.data(), 16);
  launch_early("scatter_tiles", grouped ? scatter_rows<4> : scatter_rows<1>,
               static_cast<unsigned>(x.shape()[0]), kThreads, stream, x.as<float>(),
               patches.as<float>(), first, positions.as<float>(), positions.shape()[0], dim);
}

void take_tiles(TensorView y, int64_t first, ConstTensorView x, int64_t rows_per_tile,
                int64_t skipped, Stream& stream) {
  const int64_t dim = x.shape()[1];
  const int64_t width = y.shape()[1];
  float* to = y.as<float>() + first;
  const bool grouped =
      dim % 4 == 0 && width % 4 == 0 && is_aligned(x.data(), 16) && is_aligned(to, 16);
  launch_early("take_tiles", grouped ? take_rows<4> : take_rows<1>,
               static_cast<unsigned>(y.shape()[0]), kThreads, stream, to, x.as<float>(), width, dim,
               rows_per_tile, skipped);
}

}  // namespace kvlm::cuda
