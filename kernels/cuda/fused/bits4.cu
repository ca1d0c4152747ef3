#include "kernels/codecs/bits4.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits4, Scaled::kChannel, Bits4, Scaled::kToken32>;
template struct FusedKernel<Bits4, Scaled::kToken, Bits4, Scaled::kToken>;

}  // namespace kvlm::cuda::packed
