#include "kernels/codecs/bits3.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template void launch_fused<Bits3, Scaled::kChannel, Bits3, Scaled::kToken32>(const AttendArgs&,
                                                                             const FusedArgs&,
                                                                             Stream&);

}  // namespace kvlm::cuda::packed
