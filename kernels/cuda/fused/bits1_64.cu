#include "kernels/codecs/bits.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits1<64>, Scaled::kChannel, Bits1<64>, Scaled::kToken32>;
template struct FusedKernel<Bits1<64>, Scaled::kToken, Bits1<64>, Scaled::kToken>;

}  // namespace kvlm::cuda::packed
