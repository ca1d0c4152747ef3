#pragma once

#include "kernels/codecs/bits.h"
#include "kernels/codecs/bits21.h"
#include "kernels/codecs/bits3.h"
#include "kernels/codecs/bits5.h"
#include "kernels/codecs/trit2b.h"
#include "kernels/codecs/trit5.h"
#include "kernels/cuda/attend/fused_attention.h"

// The pairs of codecs, of keys and of values, that have a kernel of the fused decode attention, how
// either is scaled, and for which head_dims. kernels/CMakeLists.txt makes the files that
// instantiate them of what it reads here. Keys' rows are whole words, which those of 1, 3 and 5
// bits are not at 80.
#define KVLM_FUSED_PAIRS(PAIR)                                        \
  PAIR(Bits1, kChannel, Bits1, kToken32, 64, 96, 128, 256) /* kivi */ \
  PAIR(Bits2, kChannel, Bits1, kToken32, 64, 80, 96, 128, 256)        \
  PAIR(Bits2, kChannel, Bits2, kToken32, 64, 80, 96, 128, 256)        \
  PAIR(Bits3, kChannel, Bits3, kToken32, 64, 96, 128, 256)            \
  PAIR(Bits4, kChannel, Bits4, kToken32, 64, 80, 96, 128, 256)        \
  PAIR(Bits5, kChannel, Bits5, kToken32, 64, 96, 128, 256)            \
  PAIR(Bits8, kChannel, Bits8, kToken32, 64, 80, 96, 128, 256)        \
  PAIR(Bits1, kToken, Bits1, kToken, 64, 96, 128, 256)                \
  PAIR(Bits2, kToken, Bits2, kToken, 64, 80, 96, 128, 256)            \
  PAIR(Bits4, kToken, Bits4, kToken, 64, 80, 96, 128, 256)            \
  PAIR(Bits8, kToken, Bits8, kToken, 64, 80, 96, 128, 256)            \
  PAIR(Bits2, kToken32, Bits2, kToken32, 64, 96, 128, 256)            \
  PAIR(Bits21, kChannel, Trit5, kChannel, 128) /* vidkv */            \
  PAIR(Bits21, kChannel, Trit5, kToken32, 128)                        \
  PAIR(Bits21, kChannel, Trit2b, kChannel, 128)                       \
  PAIR(Bits21, kChannel, Bits1, kChannel, 128)                        \
  PAIR(Bits21, kChannel, Bits2, kChannel, 128)

namespace kvlm::cuda::packed {

/// A kernel of the table; fused_kernel.cuh has its functions.
template <class K, Scaled kKeys, class V, Scaled kValues>
struct FusedKernel {
  static constexpr int kDim = K::kDim;  // not that of packed_tiles.cuh
  /// It serves lanes that are placed: those whose keys and values are packed by tokens, which
  /// therefore leave their windows together and lie in the same places.
  static constexpr bool kMayLoseRows = kKeys != Scaled::kChannel && kKeys == kValues;

  static void launch(const AttendArgs& args, const FusedArgs& fused, Stream& stream);
  /// Shared memory of a block that serves `groups` groups of queries (1 or most_groups()), at most,
  /// for lanes that have so many sources of queries.
  static int shared_bytes(int sources, int groups);
};

}  // namespace kvlm::cuda::packed
