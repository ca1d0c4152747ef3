#include "kernels/codecs/bits1.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template void launch_fused<Bits1, Scaled::kChannel, Bits1, Scaled::kToken32>(const AttendArgs&,
                                                                             const FusedArgs&,
                                                                             Stream&);
template void launch_fused<Bits1, Scaled::kToken, Bits1, Scaled::kToken>(const AttendArgs&,
                                                                         const FusedArgs&, Stream&);

}  // namespace kvlm::cuda::packed
