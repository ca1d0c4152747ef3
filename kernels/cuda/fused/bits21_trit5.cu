#include "kernels/codecs/bits21.h"
#include "kernels/codecs/trit5.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

template void launch_fused<codecs::Bits21, codecs::Trit5>(const AttendArgs&, const FusedArgs&,
                                                          Stream&);

}  // namespace kvlm::cuda::packed
