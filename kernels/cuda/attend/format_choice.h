#pragma once

#include <bit>
#include <cmath>

#include "kernels/attend_packed.h"
#include "kernels/codecs/codec.h"
#include "kernels/cuda/attend/fused_attention.h"

// Which packed rows the kernels that attend on the tensor cores can read.
namespace kvlm::cuda::packed {

/// Whether a token has several scales.
inline bool has_groups(const PackedFormat& format) {
  return format.axis == ScaleAxis::kToken && format.group_size < format.channels();
}

/// Whether codec C, scaled so, reads a format.
template <class C, Scaled kScaled>
bool is_read_by(const PackedFormat& format) {
  if ((format.axis == ScaleAxis::kChannel) != (kScaled == Scaled::kChannel) ||
      (has_groups(format) ? format.group_size : 0) != scaled_group(kScaled)) {
    return false;
  }
  if (format.sections != static_cast<int>(C::kSections.size())) return false;
  for (size_t i = 0; i < C::kSections.size(); ++i) {
    if (format.section[i].code != C::kSections[i].code ||
        format.section[i].channels != C::kSections[i].channels) {
      return false;
    }
  }
  return true;
}

/// Whether scales and zero points of rows of head_dim channels are such as the kernels take.
bool is_scaled_simply(const PackedFormat& format, int head_dim);
/// Whether codes, scales and zero points are aligned as the copies that bring them ask, and no row
/// of a block is gone. Of f16 rows, whether they are f16 rows.
bool is_placed_well(const SlotRun& run);

}  // namespace kvlm::cuda::packed
