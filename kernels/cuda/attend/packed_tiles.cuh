#pragma once

#include <type_traits>

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/packed_mma.cuh"
#include "kernels/cuda/device/async_copies.cuh"
#include "kernels/cuda/device/launch.cuh"

// Shared by the kernels that attend on the tensor cores. Tokens, as codes or f16, are the rows of
// one operand (slots for scores, channels for values). The 8 columns of the other are four queries,
// or their weights, each as the sum of a high and a low half, so that little is lost.
namespace kvlm::cuda::packed {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kDim = 128;
constexpr int kGroupQueries = 4;  // two columns of an operand each
constexpr int kTileSlots = 16;
constexpr unsigned kAll = 0xffffffffu;

/// Loads 4 * kWords bytes, in as few instructions as possible.
template <int kWords>
__device__ void load_words(const std::byte* from, uint32_t (&to)[kWords]) {
  if constexpr (kWords == 1) {
    to[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kWords % 4 != 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 x = __ldg(reinterpret_cast<const uint2*>(from) + i / 2);
      to[i] = x.x, to[i + 1] = x.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
      to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
  }
}

__device__ inline float2 two_floats(uint32_t halves) {
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

/// Meaning of a section's codes: x = slope * s * c + z, with z = offset * s if none is stored.
/// Slope and offset are powers of two, or 0.
struct Meaning {
  float slope = 1;
  float offset = 0;
  bool zero_stored = true;

  __device__ Meaning() {}
  __device__ explicit Meaning(const PackedSection& section)
      : slope(section.slope), offset(section.offset), zero_stored(section.zero_stored) {}
};

/// Scale and zero point i of a block.
__device__ inline float2 one_affine(const DeviceBlock& block, const Meaning& meaning, int i) {
  const float scale = __half2float(reinterpret_cast<const __half*>(block.scales)[i]);
  return {meaning.slope * scale, meaning.zero_stored
                                     ? __half2float(reinterpret_cast<const __half*>(block.zeros)[i])
                                     : meaning.offset * scale};
}

/// A thread's position in the operands of mma().
struct OperandThread {
  int warp = static_cast<int>(threadIdx.x / 32);
  int row = static_cast<int>(threadIdx.x % 32 / 4);  // and row + 8
  int quarter = static_cast<int>(threadIdx.x % 4);
  int asked = row / 2;        // query of column `row`
  bool lower = row % 2 == 1;  // the column has its low half
};

constexpr int kChannelGroup = 32;  // channels of a token that may share a scale

}  // namespace kvlm::cuda::packed
