#pragma once

#include "kernels/codecs/bits1.h"
#include "kernels/codecs/bits2.h"
#include "kernels/codecs/bits21.h"
#include "kernels/codecs/bits3.h"
#include "kernels/codecs/bits4.h"
#include "kernels/codecs/bits8.h"
#include "kernels/codecs/trit5.h"
#include "kernels/cuda/fused_attention.h"

// The pairs of codecs, of keys and of values, that have a kernel of the fused decode attention.
// Each is instantiated in a file of its own, kernels/cuda/fused/KEYS_VALUES.cu, so that they
// compile side by side.
#define KVLM_FUSED_PAIRS(PAIR) \
  PAIR(Bits1, Bits1)           \
  PAIR(Bits2, Bits1)           \
  PAIR(Bits2, Bits2)           \
  PAIR(Bits3, Bits3)           \
  PAIR(Bits4, Bits4)           \
  PAIR(Bits8, Bits8)           \
  PAIR(Bits21, Trit5)

namespace kvlm::cuda::packed {

template <class K, class V>
void launch_fused(const AttendArgs& args, const FusedArgs& fused, Stream& stream);

}  // namespace kvlm::cuda::packed
