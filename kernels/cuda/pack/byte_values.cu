#include <algorithm>

#include "kernels/cpu/stream_copy.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/pack/byte_values.h"

// Uploads image bytes unconverted and looks up their values on the GPU. Upload is in a few chunks:
// the GPU copies one while the host's threads stage the next in pinned memory. More chunks mean
// more waits for the slowest thread.
namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;

struct BytePlan {
  const uint8_t* from;
  const float* values;  // (groups, 256)
  int64_t count;        // of elements of `to`
  int columns, width;   // of `from` and `to`
  int of_table;         // columns
};

/// kWidth columns of a row per thread and iteration.
template <class To, int kWidth>
__global__ void __launch_bounds__(kThreads) look_up(To* to, BytePlan plan) {
  let_next_start();
  wait_for_earlier();
  const int64_t step = int64_t{gridDim.x} * kThreads * kWidth;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth; i < plan.count;
       i += step) {
    const int64_t row = i / plan.width;
    const auto column = static_cast<int>(i - row * plan.width);
    float found[kWidth] = {};
    if (column < plan.columns) {
      const uint8_t* at = plan.from + row * plan.columns + column;
      alignas(4) uint8_t bytes[kWidth];
      if constexpr (kWidth == 4) {
        *reinterpret_cast<uint32_t*>(bytes) = *reinterpret_cast<const uint32_t*>(at);
      } else {
        bytes[0] = *at;
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        found[j] = __ldg(plan.values + (column + j) / plan.of_table * 256 + bytes[j]);
      }
    }
    store_group(to + i, found);
  }
}

/// Uploads the bytes of `from` to `to` on the GPU.
void send_bytes(std::byte* to, ConstTensorView from, Stream& stream) {
  constexpr size_t kPieceBytes = size_t{2} << 20;
  constexpr size_t kTaskBytes = size_t{1} << 16;
  size_t bytes = 0;
  for (size_t first = 0; first < from.bytes(); first += bytes) {
    // The first chunk is small, because the GPU idles while it is staged.
    bytes = std::min(first == 0 ? kPieceBytes / 4 : kPieceBytes, from.bytes() - first);
    std::byte* staged = stream.queue().stage(bytes);
    stream.pool().parallel_for((bytes + kTaskBytes - 1) / kTaskBytes, [&](size_t task, int) {
      const size_t begin = task * kTaskBytes;
      cpu::stream_copy(staged + begin, from.data() + first + begin,
                       std::min(kTaskBytes, bytes - begin));
    });
    stream.queue().send(to + first, staged, bytes);
  }
}

}  // namespace

void place_bytes(TensorView to, ConstTensorView from, ConstTensorView values, Stream& stream) {
  std::byte* bytes = stream.queue().scratch(kImageBytes, from.bytes());
  send_bytes(bytes, from, stream);
  BytePlan plan{};
  plan.from = reinterpret_cast<const uint8_t*>(bytes);
  plan.values =
      reinterpret_cast<const float*>(stream.queue().upload(values.data(), values.bytes()));
  plan.count = to.elements();
  plan.columns = static_cast<int>(from.shape()[1]);
  plan.width = static_cast<int>(to.shape()[1]);
  plan.of_table = std::max(1, plan.columns / static_cast<int>(values.shape()[0]));
  const bool grouped =
      plan.columns % 4 == 0 && plan.width % 4 == 0 && is_aligned(to.data(), 4 * sizeof(float));
  const int64_t blocks =
      std::clamp<int64_t>(ceil_div(plan.count, int64_t{kThreads} * (grouped ? 4 : 1)), 1, 8192);
  with_type(to.dtype(), [&]<class To>(To*) {
    launch_early("place_bytes", grouped ? look_up<To, 4> : look_up<To, 1>,
                 static_cast<unsigned>(blocks), kThreads, stream, reinterpret_cast<To*>(to.data()),
                 plan);
  });
}

}  // namespace kvlm::cuda
