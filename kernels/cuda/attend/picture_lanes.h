#pragma once

#include <cstdint>

#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/picture_choice.h"

// Decode attention over KV heads whose packed rows are one long block: pictures that were packed
// once, with scales by channel or for the whole head (CalibQuant, 1BitVKV).
namespace kvlm::cuda::packed {

/// Attends with the kernels of picture_choice.h that are set in `kernels`. Merges the state of a
/// lane with those of its full rows, which row_pieces.cu has left; of one that two passes serve too
/// leaves it where the last pass over values would. Results depend neither on the other lanes nor
/// on how many blocks share one: sums are integers.
///   slots  packed rows of a lane, at most
void attend_pictures(uint32_t kernels, const AttendArgs& args, const FusedArgs& fused, int slots,
                     Stream& stream);

}  // namespace kvlm::cuda::packed
