#include "kernels/codecs/bits21.h"
#include "kernels/codecs/trit5.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits21<128>, Scaled::kChannel, Trit5<128>, Scaled::kChannel>;

}  // namespace kvlm::cuda::packed
