#include "kernels/codecs/bits.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits4<80>, Scaled::kChannel, Bits4<80>, Scaled::kToken32>;
template struct FusedKernel<Bits4<80>, Scaled::kToken, Bits4<80>, Scaled::kToken>;

}  // namespace kvlm::cuda::packed
