// Hadamard transform, one warp per vector: of 64, 128 or 256 numbers in registers with shuffles, of
// any other size in shared memory.
#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/pack/hadamard.h"

namespace kvlm::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kMostParts = 4;  // tensors of a launch

struct Parts {
  const void* from[kMostParts];
  void* to[kMostParts];
  int64_t vectors[kMostParts];
};

/// The tensor (part) and the vector of this warp; part kMostParts: none.
struct Place {
  int part = 0;
  int64_t vector;

  __device__ explicit Place(const Parts& parts)
      : vector(int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) {
    while (part < kMostParts && vector >= parts.vectors[part]) vector -= parts.vectors[part++];
  }
};

/// A warp transforms a vector of 32 kEach numbers, kEach adjacent ones per thread. Same sums as
/// transform().
template <class T, int kEach>
__global__ void __launch_bounds__(kWarps * 32)
    turn_in_registers(const __grid_constant__ Parts parts) {
  struct alignas(sizeof(T) * kEach > 16 ? 16 : sizeof(T) * kEach) Group {
    T of[kEach];
  };
  let_next_start();
  const Place at(parts);
  wait_for_earlier();
  if (at.part == kMostParts) return;
  const auto warp_lane = static_cast<int>(threadIdx.x % 32);
  const int64_t index = at.vector * 32 + warp_lane;
  const Group from = static_cast<const Group*>(parts.from[at.part])[index];
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = load_float(from.of[i]);
#pragma unroll
  for (int distance = 1; distance < kEach; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((i & distance) != 0) continue;
      const float sum = x[i] + x[i + distance];
      x[i + distance] = x[i] - x[i + distance];
      x[i] = sum;
    }
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], distance);
      x[i] = (warp_lane & distance) != 0 ? other - x[i] : x[i] + other;
    }
  }
  const float scale = 1 / sqrtf(static_cast<float>(32 * kEach));
  Group made;
#pragma unroll
  for (int i = 0; i < kEach; ++i) made.of[i] = store_float<T>(x[i] * scale);
  static_cast<Group*>(parts.to[at.part])[index] = made;
}

/// Transforms n numbers, a power of two, in shared memory, by a warp.
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

/// A warp transforms a vector of any length, in blocks that are powers of two.
template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    turn_vectors(const __grid_constant__ Parts parts, int dim) {
  extern __shared__ float rooms[];
  let_next_start();
  const Place at(parts);
  wait_for_earlier();
  if (at.part == kMostParts) return;
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  float* x = rooms + threadIdx.x / 32 * dim;
  const T* from = static_cast<const T*>(parts.from[at.part]) + at.vector * dim;
  for (int i = warp_lane; i < dim; i += 32) x[i] = load_float(from[i]);
  for (int first = 0; first < dim;) {
    const int block = 1 << (31 - __clz(dim - first));
    transform(x + first, block);
    first += block;
  }
  __syncwarp();
  T* to = static_cast<T*>(parts.to[at.part]) + at.vector * dim;
  for (int i = warp_lane; i < dim; i += 32) to[i] = store_float<T>(x[i]);
}

template <class T>
void launch(const Parts& parts, int64_t vectors, int dim, Stream& stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(vectors, kWarps));
  const auto in_registers = [&](auto kernel) {
    launch_early("hadamard", kernel, blocks, kWarps * 32, stream, parts);
  };
  switch (dim) {
    case 64:
      return in_registers(turn_in_registers<T, 2>);
    case 128:
      return in_registers(turn_in_registers<T, 4>);
    case 256:
      return in_registers(turn_in_registers<T, 8>);
    default:
      launch_early("hadamard", turn_vectors<T>, blocks, kWarps * 32,
                   kWarps * static_cast<size_t>(dim) * sizeof(float), stream, parts, dim);
  }
}

}  // namespace

void hadamard(std::span<const HadamardRows> rows, Stream& stream) {
  const auto dim = static_cast<int>(rows[0].from.shape().back());
  with_type(rows[0].from.dtype(), [&]<class T>(T*) {
    for (size_t first = 0; first < rows.size(); first += kMostParts) {
      Parts parts{};
      int64_t vectors = 0;
      for (size_t i = first; i < std::min(first + kMostParts, rows.size()); ++i) {
        parts.from[i - first] = rows[i].from.data();
        parts.to[i - first] = rows[i].to.data();
        vectors += parts.vectors[i - first] = rows[i].from.elements() / dim;
      }
      if (vectors > 0) launch<T>(parts, vectors, dim, stream);
    }
  });
}

}  // namespace kvlm::cuda
