#include "kernels/codecs/bits.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits2<256>, Scaled::kChannel, Bits1<256>, Scaled::kToken32>;
template struct FusedKernel<Bits2<256>, Scaled::kChannel, Bits2<256>, Scaled::kToken32>;
template struct FusedKernel<Bits2<256>, Scaled::kToken, Bits2<256>, Scaled::kToken>;
template struct FusedKernel<Bits2<256>, Scaled::kToken32, Bits2<256>, Scaled::kToken32>;

}  // namespace kvlm::cuda::packed
