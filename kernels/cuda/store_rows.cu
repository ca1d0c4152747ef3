#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/store_rows.h"

namespace kvlm::cuda {

namespace {

/// Heads of one launch: their destinations travel as an argument.
constexpr int kHeads = 64;

struct Destinations {
  void* data[kHeads];
};

template <class T>
__global__ void store(Destinations destinations, const float* x, int heads, int first_head,
                      int count, int head_dim, int64_t rows) {
  let_next_start();
  wait_for_earlier();
  const int64_t elements = rows * count * head_dim;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements;
       i += step) {
    const auto channel = static_cast<int>(i % head_dim);
    const auto head = static_cast<int>(i / head_dim % count);
    const int64_t row = i / head_dim / count;
    static_cast<T*>(destinations.data[head])[row * head_dim + channel] =
        store_float<T>(x[(row * heads + first_head + head) * head_dim + channel]);
  }
}

}  // namespace

void store_rows(std::span<const RowDestination> destinations, DType dtype, ConstTensorView x,
                Stream& stream) {
  constexpr int kThreads = 256;
  const int64_t rows = x.shape()[0];
  const auto heads = static_cast<int>(x.shape()[1]);
  const auto head_dim = static_cast<int>(x.shape()[2]);
  if (x.elements() == 0) return;
  for (int first = 0; first < heads; first += kHeads) {
    const int count = std::min(kHeads, heads - first);
    Destinations to{};
    for (int head = 0; head < count; ++head) {
      to.data[head] = destinations[static_cast<size_t>(first + head)].data;
    }
    const auto blocks =
        static_cast<unsigned>(std::min<int64_t>(ceil_div(rows * count * head_dim, kThreads), 4096));
    with_type(dtype, [&](auto* type) {
      using T = typename TypeOf<decltype(type)>::Type;
      launch_early("store_rows", store<T>, blocks, kThreads, stream, to, x.as<float>(), heads,
                   first, count, head_dim, rows);
    });
  }
}

}  // namespace kvlm::cuda
