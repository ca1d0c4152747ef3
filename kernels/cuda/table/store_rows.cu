#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/table/store_rows.h"

// Stores rows of f32 as consecutive rows of a dense array per KV head: keys and values of a prompt,
// at addresses that the host knows. Rings of the decode table are stored by count_rows.cu.
namespace kvlm::cuda {

namespace {

/// KV heads of one launch, whose destinations are a kernel argument.
constexpr int kHeads = 64;

struct Destinations {
  void* data[kHeads];
};

constexpr int kThreads = 256;

/// A thread stores `Together` channels. Block (row, channels of all KV heads).
template <class T, int Together>
__global__ void store(Destinations destinations, const float* x, int heads, int first_head,
                      int count, int head_dim) {
  let_next_start();
  wait_for_earlier();
  const int groups = head_dim / Together;  // of a head
  const int i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  if (i >= count * groups) return;
  const int head = i / groups;
  const int channel = i % groups * Together;
  const auto row = static_cast<int64_t>(blockIdx.x);
  const float* from = x + (row * heads + first_head + head) * head_dim + channel;
  T* to = static_cast<T*>(destinations.data[head]) + row * head_dim + channel;
  if constexpr (Together == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    struct alignas(4 * sizeof(T)) Four {
      T of[4];
    };
    *reinterpret_cast<Four*>(to) = {store_float<T>(four.x), store_float<T>(four.y),
                                    store_float<T>(four.z), store_float<T>(four.w)};
  } else {
    *to = store_float<T>(*from);
  }
}

/// Whether four channels can be read and written at once.
bool goes_by_four(std::span<const RowDestination> destinations, const float* x, int head_dim) {
  constexpr size_t kAlignment = 4 * sizeof(float);
  const auto aligned = [](const void* at) {
    return reinterpret_cast<uintptr_t>(at) % kAlignment == 0;
  };
  return head_dim % 4 == 0 && aligned(x) &&
         std::all_of(destinations.begin(), destinations.end(),
                     [&](const RowDestination& to) { return aligned(to.data); });
}

}  // namespace

void store_rows(std::span<const RowDestination> destinations, DType dtype, ConstTensorView x,
                Stream& stream) {
  const int64_t rows = x.shape()[0];
  const auto heads = static_cast<int>(x.shape()[1]);
  const auto head_dim = static_cast<int>(x.shape()[2]);
  if (x.elements() == 0) return;
  const int together = goes_by_four(destinations, x.as<float>(), head_dim) ? 4 : 1;
  for (int first = 0; first < heads; first += kHeads) {
    const int count = std::min(kHeads, heads - first);
    Destinations to{};
    for (int head = 0; head < count; ++head) {
      to.data[head] = destinations[static_cast<size_t>(first + head)].data;
    }
    const dim3 grid(static_cast<unsigned>(rows),
                    static_cast<unsigned>(ceil_div(count * (head_dim / together), kThreads)));
    with_type(dtype, [&]<class T>(T*) {
      launch_early("store_rows", together == 4 ? store<T, 4> : store<T, 1>, grid, kThreads, stream,
                   to, x.as<float>(), heads, first, count, head_dim);
    });
  }
}

}  // namespace kvlm::cuda
