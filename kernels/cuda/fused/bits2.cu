#include "kernels/codecs/bits1.h"
#include "kernels/codecs/bits2.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits2, Scaled::kChannel, Bits1, Scaled::kToken32>;
template struct FusedKernel<Bits2, Scaled::kChannel, Bits2, Scaled::kToken32>;
template struct FusedKernel<Bits2, Scaled::kToken, Bits2, Scaled::kToken>;
template struct FusedKernel<Bits2, Scaled::kToken32, Bits2, Scaled::kToken32>;

}  // namespace kvlm::cuda::packed
