#include "kernels/codecs/bits1.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits1, Scaled::kChannel, Bits1, Scaled::kToken32>;
template struct FusedKernel<Bits1, Scaled::kToken, Bits1, Scaled::kToken>;

}  // namespace kvlm::cuda::packed
