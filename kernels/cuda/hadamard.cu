#include <algorithm>

#include "kernels/cuda/hadamard.h"
#include "kernels/cuda/launch.cuh"

namespace kvlm::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kMostParts = 4;  // tensors of a launch

struct Parts {
  const void* from[kMostParts];
  void* to[kMostParts];
  int64_t vectors[kMostParts];
};

/// The transform of n numbers, a power of two, that lie in shared memory, by a warp.
__device__ void transform(float* x, int n) {
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  for (int distance = 1; distance < n; distance *= 2) {
    __syncwarp();
    for (int i = warp_lane; i < n / 2; i += 32) {
      float* low = x + i / distance * 2 * distance + i % distance;
      float* high = low + distance;
      const float sum = *low + *high;
      *high = *low - *high;
      *low = sum;
    }
  }
  __syncwarp();
  const float scale = 1 / sqrtf(static_cast<float>(n));
  for (int i = warp_lane; i < n; i += 32) x[i] *= scale;
}

/// A vector for each warp.
template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    turn_vectors(const __grid_constant__ Parts parts, int dim) {
  extern __shared__ float rooms[];
  let_next_start();
  wait_for_earlier();
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  int64_t vector = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  int part = 0;
  while (part < kMostParts && vector >= parts.vectors[part]) vector -= parts.vectors[part++];
  if (part == kMostParts) return;
  float* x = rooms + warp * dim;
  const T* from = static_cast<const T*>(parts.from[part]) + vector * dim;
  for (int i = warp_lane; i < dim; i += 32) x[i] = load_float(from[i]);
  for (int first = 0; first < dim;) {
    const int block = 1 << (31 - __clz(dim - first));
    transform(x + first, block);
    first += block;
  }
  __syncwarp();
  T* to = static_cast<T*>(parts.to[part]) + vector * dim;
  for (int i = warp_lane; i < dim; i += 32) to[i] = store_float<T>(x[i]);
}

}  // namespace

void hadamard(std::span<const HadamardRows> rows, Stream& stream) {
  const auto dim = static_cast<int>(rows[0].from.shape().back());
  with_type(rows[0].from.dtype(), [&](auto* element) {
    using T = typename TypeOf<decltype(element)>::Type;
    for (size_t first = 0; first < rows.size(); first += kMostParts) {
      Parts parts{};
      int64_t vectors = 0;
      for (size_t i = first; i < std::min(first + kMostParts, rows.size()); ++i) {
        parts.from[i - first] = rows[i].from.data();
        parts.to[i - first] = rows[i].to.data();
        vectors += parts.vectors[i - first] = rows[i].from.elements() / dim;
      }
      if (vectors == 0) continue;
      launch_early("hadamard", turn_vectors<T>, static_cast<unsigned>(ceil_div(vectors, kWarps)),
                   kWarps * 32, kWarps * static_cast<size_t>(dim) * sizeof(float), stream, parts,
                   dim);
    }
  });
}

}  // namespace kvlm::cuda
