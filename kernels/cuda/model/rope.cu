#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/model/rope.h"
#include "kernels/cuda/model/turn_pairs.cuh"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMostParts = 4;

/// Heads of one row, of several tensors.
struct Parts {
  float* x[kMostParts];
  int heads[kMostParts];
};

/// Part of row blockIdx.x: kWidth pairs of channels a thread.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    rotate_rows(Parts parts, const float* cos, const float* sin, int head_dim, int half) {
  let_next_start();
  wait_for_earlier();
  const int64_t row = blockIdx.x;
  const int groups = half / kWidth;
  const int i = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  int head = i / groups;
  int part = 0;
  while (part < kMostParts && head >= parts.heads[part]) head -= parts.heads[part++];
  if (part == kMostParts) return;
  const int channel = i % groups * kWidth;
  float* low = parts.x[part] + (row * parts.heads[part] + head) * head_dim + channel;
  turn_pairs<kWidth>(low, low + half, cos + row * half + channel, sin + row * half + channel);
}

/// The tensors of one launch, which have equal head_dim.
struct Batch {
  Parts parts{};
  size_t count = 0;
  int heads = 0;
  bool grouped = true;  // all begin where four channels can be read at once
};

/// The first of `xs`, as many as go together.
Batch first_of(std::span<const TensorView> xs) {
  Batch made;
  for (; made.count < std::min<size_t>(xs.size(), kMostParts); ++made.count) {
    const TensorView& x = xs[made.count];
    if (x.shape()[2] != xs[0].shape()[2]) break;
    int& heads = made.parts.heads[made.count];
    heads = x.elements() == 0 ? 0 : static_cast<int>(x.shape()[1]);
    made.parts.x[made.count] = x.as<float>();
    made.heads += heads;
    made.grouped = made.grouped && is_aligned(x.data(), 16);
  }
  return made;
}

}  // namespace

void rotate(std::span<const TensorView> xs, ConstTensorView cos, ConstTensorView sin,
            Stream& stream) {
  const auto half = static_cast<int>(cos.shape()[1]);
  while (!xs.empty()) {
    const auto head_dim = static_cast<int>(xs[0].shape()[2]);
    const Batch batch = first_of(xs);
    const bool grouped = batch.grouped && half % 4 == 0 && head_dim % 4 == 0 &&
                         is_aligned(cos.data(), 16) && is_aligned(sin.data(), 16);
    const int64_t threads = int64_t{batch.heads} * half / (grouped ? 4 : 1);
    const dim3 grid(static_cast<unsigned>(cos.shape()[0]),
                    static_cast<unsigned>(ceil_div(threads, kThreads)));
    if (threads > 0) {
      launch_early("rotate", grouped ? rotate_rows<4> : rotate_rows<1>, grid, kThreads, stream,
                   batch.parts, cos.as<float>(), sin.as<float>(), head_dim, half);
    }
    xs = xs.subspan(batch.count);
  }
}

}  // namespace kvlm::cuda
