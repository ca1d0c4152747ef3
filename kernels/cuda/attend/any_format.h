#pragma once

#include "kernels/cuda/attend/fused_attention.h"

namespace kvlm::cuda::packed {

/// The two passes over runs that no kernel of two_pass.cu reads: any format, and full rows.
///   channels  of a packed row, at most
void launch_any_pass(bool keys, const AttendArgs& args, const FusedArgs& fused, int channels,
                     Stream& stream);

}  // namespace kvlm::cuda::packed
