#include "kernels/codecs/bits3.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

template void launch_fused<codecs::Bits3, codecs::Bits3>(const AttendArgs&, const FusedArgs&,
                                                         Stream&);

}  // namespace kvlm::cuda::packed
