#include "kernels/decode_table.h"

#include <algorithm>
#include <array>

namespace kvlm {

namespace {

constexpr int kMostBlockRows = 256;  // splits of attention have at least as many slots

constexpr std::array kOfLoad{
    &TableLoad::slots,         &TableLoad::longest,      &TableLoad::fixed_segments,
    &TableLoad::listed_blocks, &TableLoad::words,        &TableLoad::weighed_rows,
    &TableLoad::blocks,        &TableLoad::fixed_blocks, &TableLoad::turns};

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

bool TableLoad::holds(const TableLoad& other) const noexcept {
  return std::all_of(kOfLoad.begin(), kOfLoad.end(),
                     [&](auto of) { return other.*of <= this->*of; });
}

void TableLoad::grow(const TableLoad& other) noexcept {
  for (const auto of : kOfLoad) this->*of = std::max(this->*of, other.*of);
}

PlacedRows PlacedCopy::rows(size_t head) const {
  PlacedRows rows;
  for (const size_t side : {size_t{0}, size_t{1}}) {
    rows.sides[side] = sides[head * 2 + side];
    rows.sides[side].came.assign(static_cast<size_t>(held[head * 2 + side]), WeighedRows::kNoRow);
  }
  const size_t keys = rows.sides[0].came.size();
  if (!weights.empty()) rows.weights.resize(keys);
  for (size_t place = 0; place < keys; ++place) {
    const size_t at = head * places + place;
    if (came[at] == WeighedRows::kNoRow) continue;
    rows.sides[0].came[place] = came[at];
    if (!weights.empty()) rows.weights[place] = weights[at];
    // The row of a step that has not come to this layer has no value yet.
    if (value_at[at] >= 0) rows.sides[1].came[static_cast<size_t>(value_at[at])] = came[at];
  }
  return rows;
}

}  // namespace kvlm
