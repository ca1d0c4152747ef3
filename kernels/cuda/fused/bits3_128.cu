#include "kernels/codecs/bits3.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits3<128>, Scaled::kChannel, Bits3<128>, Scaled::kToken32>;

}  // namespace kvlm::cuda::packed
