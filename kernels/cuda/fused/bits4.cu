#include "kernels/codecs/bits4.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template void launch_fused<Bits4, Scaled::kChannel, Bits4, Scaled::kToken32>(const AttendArgs&,
                                                                             const FusedArgs&,
                                                                             Stream&);
template void launch_fused<Bits4, Scaled::kToken, Bits4, Scaled::kToken>(const AttendArgs&,
                                                                         const FusedArgs&, Stream&);

}  // namespace kvlm::cuda::packed
