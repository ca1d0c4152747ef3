#include "kernels/decode_table.h"

namespace kvlm {

namespace {

constexpr int kMostBlockRows = 256;  // splits of attention have at least as many slots

}  // namespace

bool can_pack_windows(const PackedFormat& format, const std::array<PackRule, 2>& rules,
                      int rows) noexcept {
  if (format.sections != 1 || rules[0].rule != CodeRule::kAffine) return false;
  if (format.axis == ScaleAxis::kToken) return true;
  constexpr int kShared = 48 * 1024;
  return format.axis == ScaleAxis::kChannel && rules[0].alpha == 0 && format.block_rows > 0 &&
         format.block_rows <= kMostBlockRows && rows % format.block_rows == 0 &&
         format.block_rows * format.channels() <= kShared;
}

}  // namespace kvlm
