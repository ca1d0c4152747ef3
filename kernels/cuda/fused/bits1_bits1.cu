#include "kernels/codecs/bits1.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

template void launch_fused<codecs::Bits1, codecs::Bits1>(const AttendArgs&, const FusedArgs&,
                                                         Stream&);

}  // namespace kvlm::cuda::packed
