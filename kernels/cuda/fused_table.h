#pragma once

#include "kernels/codecs/bits1.h"
#include "kernels/codecs/bits2.h"
#include "kernels/codecs/bits21.h"
#include "kernels/codecs/bits3.h"
#include "kernels/codecs/bits4.h"
#include "kernels/codecs/bits5.h"
#include "kernels/codecs/bits8.h"
#include "kernels/codecs/trit5.h"
#include "kernels/cuda/fused_attention.h"

// The pairs of codecs, of keys and of values, that have a kernel of the fused decode attention, and
// how either is scaled. Each is instantiated in kernels/cuda/fused/, in a file for each codec of
// keys, so that they compile side by side.
#define KVLM_FUSED_PAIRS(PAIR)                      \
  PAIR(Bits1, kChannel, Bits1, kToken32) /* kivi */ \
  PAIR(Bits2, kChannel, Bits1, kToken32)            \
  PAIR(Bits2, kChannel, Bits2, kToken32)            \
  PAIR(Bits3, kChannel, Bits3, kToken32)            \
  PAIR(Bits4, kChannel, Bits4, kToken32)            \
  PAIR(Bits5, kChannel, Bits5, kToken32)            \
  PAIR(Bits8, kChannel, Bits8, kToken32)            \
  PAIR(Bits1, kToken, Bits1, kToken)                \
  PAIR(Bits2, kToken, Bits2, kToken)                \
  PAIR(Bits4, kToken, Bits4, kToken)                \
  PAIR(Bits8, kToken, Bits8, kToken)                \
  PAIR(Bits2, kToken32, Bits2, kToken32)            \
  PAIR(Bits21, kChannel, Trit5, kChannel)

namespace kvlm::cuda::packed {

/// A kernel of the table; fused_kernel.cuh has its functions.
template <class K, Scaled kKeys, class V, Scaled kValues>
struct FusedKernel {
  static void launch(const AttendArgs& args, const FusedArgs& fused, Stream& stream);
  /// Shared memory of a block, at most, for lanes that have so many sources of queries.
  static int shared_bytes(int sources);
};

}  // namespace kvlm::cuda::packed
