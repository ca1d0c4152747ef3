#include "kernels/codecs/bits.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits2<80>, Scaled::kChannel, Bits1<80>, Scaled::kToken32>;
template struct FusedKernel<Bits2<80>, Scaled::kChannel, Bits2<80>, Scaled::kToken32>;
template struct FusedKernel<Bits2<80>, Scaled::kToken, Bits2<80>, Scaled::kToken>;

}  // namespace kvlm::cuda::packed
