#include "kernels/codecs/bits21.h"
#include "kernels/codecs/trit5.h"
#include "kernels/cuda/fused_kernel.cuh"

namespace kvlm::cuda::packed {

using namespace codecs;

template void launch_fused<Bits21, Scaled::kChannel, Trit5, Scaled::kChannel>(const AttendArgs&,
                                                                              const FusedArgs&,
                                                                              Stream&);

}  // namespace kvlm::cuda::packed
