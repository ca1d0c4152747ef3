#pragma once

#include "kernels/codecs/list.h"
#include "kernels/cuda/attend/fused_attention.h"

// The one-pass kernels, by the codecs and scales of keys and values. instances.cmake lists them;
// two_pass.h has those of two passes.
namespace kvlm::cuda::packed {

/// A listed kernel; fused_kernel.cuh has its functions.
template <class K, Scaled kKeys, class V, Scaled kValues>
struct FusedKernel {
  static constexpr int kDim = K::kDim;  // not that of packed_tiles.cuh
  /// Whether it takes KV heads that evict packed tokens in place, or whose weights are wanted. Keys
  /// and values must be packed by token: then both leave their windows together and have one place.
  static constexpr bool kMayLoseRows = kKeys != Scaled::kChannel && kKeys == kValues;

  static void launch(const AttendArgs& args, const FusedArgs& fused, Stream& stream);
  /// Most shared memory of a block, for `groups` groups of queries (1 or most_groups()) and
  /// `sources` query bases.
  static int shared_bytes(int sources, int groups);
};

}  // namespace kvlm::cuda::packed
