#include <bit>
#include <cmath>

#include "kernels/cuda/attend/format_choice.h"

namespace kvlm::cuda::packed {

namespace {

bool is_power_of_two_or_zero(float x) {
  int exponent = 0;
  return x == 0 || std::frexp(std::abs(x), &exponent) == 0.5f;
}

/// Required alignment of scales and zero points: the bytes of one copy.
size_t meta_alignment(const PackedFormat& format) {
  if (format.axis == ScaleAxis::kChannel) return 16;
  if (format.axis == ScaleAxis::kHead) return 2;
  const auto row_bytes = 2 * static_cast<size_t>(format.groups());
  return std::has_single_bit(row_bytes) ? row_bytes : 8;
}

}  // namespace

bool is_scaled_simply(const PackedFormat& format, int head_dim) {
  const bool by_token = format.axis == ScaleAxis::kToken;
  if (format.meta != DType::kF16 || format.channels() != head_dim ||
      (has_groups(format) && format.group_size != 32 && format.group_size != 64)) {
    return false;
  }
  bool stored = true;
  for (int i = 0; i < format.sections; ++i) {
    const PackedSection& section = format.section[static_cast<size_t>(i)];
    if (section.zero_stored && !stored) return false;  // stored zero points are indexed by channel
    stored = stored && section.zero_stored;
    if (section.zero_stored && section.slope == 1) continue;
    if (by_token && !section.zero_stored && section == section_of(section.code, section.channels)) {
      continue;
    }
    if (section.zero_stored || format.axis != ScaleAxis::kChannel ||
        !is_power_of_two_or_zero(section.slope) || !is_power_of_two_or_zero(section.offset) ||
        !is_power_of_two_or_zero(section.offset_after)) {
      return false;
    }
  }
  return true;
}

bool is_placed_well(const SlotSegment& segment) {
  if (!is_aligned(segment.q, 16)) return false;
  if (segment.format == nullptr)
    return segment.dtype == DType::kF16 && is_aligned(segment.rows, 16);
  const size_t meta = meta_alignment(*segment.format);
  if (segment.code_stride % 16 != 0 ||
      segment.scale_stride % static_cast<std::ptrdiff_t>(meta) != 0) {
    return false;
  }
  for (const PackedBlock& block : segment.blocks) {
    if (block.live != nullptr || !is_aligned(block.codes, 16) || !is_aligned(block.scales, meta) ||
        !is_aligned(block.zeros, meta)) {
      return false;
    }
    if (segment.code_stride != 0) break;  // even strides: all are alike
  }
  return true;
}

}  // namespace kvlm::cuda::packed
