#include "kernels/codecs/bits8.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

template void launch_fused<codecs::Bits8, codecs::Bits8>(const AttendArgs&, const FusedArgs&,
                                                         Stream&);

}  // namespace kvlm::cuda::packed
