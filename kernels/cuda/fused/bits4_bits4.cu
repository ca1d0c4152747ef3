#include "kernels/codecs/bits4.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

template void launch_fused<codecs::Bits4, codecs::Bits4>(const AttendArgs&, const FusedArgs&,
                                                         Stream&);

}  // namespace kvlm::cuda::packed
