#include <algorithm>

#include "kernels/cuda/device/fill.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/fill.h"

namespace kvlm::cuda {

namespace {

/// T is the project's own type, whose conversion is the CPU's, bit for bit.
template <class T>
__global__ void fill(T* out, uint64_t seed, float width, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    out[i] = from_float<T>(random_value(seed, static_cast<uint64_t>(i), width));
  }
}

template <class T>
void launch(T* out, uint64_t seed, float width, int64_t count, Stream& stream) {
  constexpr int kThreads = 256;
  const auto blocks =
      static_cast<unsigned>(std::clamp<int64_t>(ceil_div(count, kThreads), 1, 8192));
  fill<<<blocks, kThreads, 0, native(stream)>>>(out, seed, width, count);
  check_launch("fill_random");
}

}  // namespace

void fill_random(TensorView out, uint64_t seed, float width, Stream& stream) {
  switch (out.dtype()) {
    case DType::kF16:
      return launch(out.as<f16>(), seed, width, out.elements(), stream);
    case DType::kBF16:
      return launch(out.as<bf16>(), seed, width, out.elements(), stream);
    default:
      return launch(out.as<float>(), seed, width, out.elements(), stream);
  }
}

}  // namespace kvlm::cuda
