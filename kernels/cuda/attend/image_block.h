#pragma once

#include <cstdint>

#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/image_choice.h"

// Decode attention over an image packed as one long block, with scales by channel or one for all
// (CalibQuant, 1BitVKV). Images with a scale per token use fused_kernel.cuh or two_pass.cuh.
namespace kvlm::cuda::packed {

/// Launches the kernels of image_choice.h that are set in `kernels`. Each merges the image's state
/// with those of row_splits.cu, and writes the output. If two passes read the tokens after the
/// image, it writes the state for one more pass. Results depend neither on other KV heads nor on
/// how many blocks share one: sums are integers.
///   slots  most packed tokens of a KV head
void attend_images(uint32_t kernels, const AttendArgs& args, const FusedArgs& fused, int slots,
                   Stream& stream);

}  // namespace kvlm::cuda::packed
