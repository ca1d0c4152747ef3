#pragma once

#include <bit>
#include <cmath>

#include "kernels/attend_packed.h"
#include "kernels/codecs/codec.h"
#include "kernels/cuda/attend/fused_attention.h"

// Which segments the kernels on the tensor cores (fused_kernel.cuh, two_pass.cuh) can read.
namespace kvlm::cuda::packed {

/// Whether a token has several scales, one for each group of channels.
inline bool has_groups(const PackedFormat& format) {
  return format.axis == ScaleAxis::kToken && format.group_size < format.channels();
}

/// Whether codec C with scales kScaled reads a format.
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

/// Whether the kernels support a format's scales and zero points, for head_dim channels.
bool is_scaled_simply(const PackedFormat& format, int head_dim);
/// Whether codes, scales and zero points are aligned for copies, and no token of a block is
/// evicted. Unpacked tokens must be f16 and aligned.
bool is_placed_well(const SlotSegment& segment);

}  // namespace kvlm::cuda::packed
