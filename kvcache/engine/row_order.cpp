#include "kvcache/engine/row_order.h"

#include <algorithm>
#include <utility>

#include "kernels/decode_table.h"

namespace kvlm {

void forget_newest(std::span<int> came) {
  const auto newest = std::max_element(came.begin(), came.end());
  if (newest != came.end()) *newest = WeighedRows::kNoRow;
}

void put_in_order(HeadRows& rows, std::span<const int> came, bool newest, size_t head_dim) {
  std::vector<std::pair<int, size_t>> order;  // (arrival number, place)
  for (size_t place = 0; place < came.size(); ++place) {
    if (newest || came[place] != WeighedRows::kNoRow) order.emplace_back(came[place], place);
  }
  std::sort(order.begin(), order.end());
  HeadRows ordered;
  for (const auto& [number, place] : order) {
    const auto first = static_cast<std::ptrdiff_t>(place * head_dim);
    const auto end = first + static_cast<std::ptrdiff_t>(head_dim);
    ordered.keys.insert(ordered.keys.end(), rows.keys.begin() + first, rows.keys.begin() + end);
    ordered.values.insert(ordered.values.end(), rows.values.begin() + first,
                          rows.values.begin() + end);
    const auto at = static_cast<size_t>(number);
    ordered.tags.push_back(at < rows.tags.size() ? rows.tags[at] : kTextRow);
  }
  ordered.remaps = std::move(rows.remaps);
  rows = std::move(ordered);
}

}  // namespace kvlm
