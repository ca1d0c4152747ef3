#include "kernels/codecs/bits5.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template void launch_fused<Bits5, Scaled::kChannel, Bits5, Scaled::kToken32>(const AttendArgs&,
                                                                             const FusedArgs&,
                                                                             Stream&);

}  // namespace kvlm::cuda::packed
