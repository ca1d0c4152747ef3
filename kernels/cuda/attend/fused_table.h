#pragma once

#include "kernels/codecs/list.h"
#include "kernels/cuda/attend/fused_attention.h"

// The kernels of the fused decode attention. instances.cmake lists them.
namespace kvlm::cuda::packed {

/// A kernel of the table; fused_kernel.cuh has its functions.
template <class K, Scaled kKeys, class V, Scaled kValues>
struct FusedKernel {
  static constexpr int kDim = K::kDim;  // not that of packed_tiles.cuh
  /// It serves lanes that are placed or weighed: those whose keys and values are packed by tokens,
  /// which therefore leave their windows together and lie in the same places.
  static constexpr bool kMayLoseRows = kKeys != Scaled::kChannel && kKeys == kValues;

  static void launch(const AttendArgs& args, const FusedArgs& fused, Stream& stream);
  /// Shared memory of a block that serves `groups` groups of queries (1 or most_groups()), at most,
  /// for lanes that have so many sources of queries.
  static int shared_bytes(int sources, int groups);
};

}  // namespace kvlm::cuda::packed
