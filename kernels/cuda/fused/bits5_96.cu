#include "kernels/codecs/bits5.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits5<96>, Scaled::kChannel, Bits5<96>, Scaled::kToken32>;

}  // namespace kvlm::cuda::packed
