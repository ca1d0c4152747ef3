#include "kernels/codecs/bits.h"
#include "kernels/codecs/bits21.h"
#include "kernels/codecs/trit2b.h"
#include "kernels/codecs/trit5.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template struct FusedKernel<Bits21<128>, Scaled::kChannel, Trit5<128>, Scaled::kChannel>;
template struct FusedKernel<Bits21<128>, Scaled::kChannel, Trit5<128>, Scaled::kToken32>;
template struct FusedKernel<Bits21<128>, Scaled::kChannel, Trit2b<128>, Scaled::kChannel>;
template struct FusedKernel<Bits21<128>, Scaled::kChannel, Bits1<128>, Scaled::kChannel>;
template struct FusedKernel<Bits21<128>, Scaled::kChannel, Bits2<128>, Scaled::kChannel>;

}  // namespace kvlm::cuda::packed
