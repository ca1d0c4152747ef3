#include "kernels/codecs/bits8.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits8, Scaled::kChannel, Bits8, Scaled::kToken32>;
template struct FusedKernel<Bits8, Scaled::kToken, Bits8, Scaled::kToken>;

}  // namespace kvlm::cuda::packed
