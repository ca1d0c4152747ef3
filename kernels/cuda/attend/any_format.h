#pragma once

#include "kernels/cuda/attend/fused_attention.h"

namespace kvlm::cuda::packed {

/// launch_pass() for kAnyKernel: any format, and unpacked tokens of any type.
///   channels  most of a packed token
void launch_any_pass(bool keys, const AttendArgs& args, const FusedArgs& fused, int channels,
                     Stream& stream);

}  // namespace kvlm::cuda::packed
