#include "kernels/codecs/bits8.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template void launch_fused<Bits8, Scaled::kChannel, Bits8, Scaled::kToken32>(const AttendArgs&,
                                                                             const FusedArgs&,
                                                                             Stream&);
template void launch_fused<Bits8, Scaled::kToken, Bits8, Scaled::kToken>(const AttendArgs&,
                                                                         const FusedArgs&, Stream&);

}  // namespace kvlm::cuda::packed
