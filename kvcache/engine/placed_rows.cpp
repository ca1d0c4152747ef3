#include "kvcache/engine/placed_rows.h"

#include <algorithm>
#include <utility>

namespace kvlm {

void PlacedLanes::describe(const HeadState& head, size_t index, TableLane& lane) {
  const Plane& keys = head.stores[kRest].keys;
  const Plane& values = head.stores[kRest].values;
  lane.keys_gained = keys.placed();
  lane.values_gained = values.placed();
  if (keys.is_even() && values.is_even()) return;
  keys.number_places(keys_[index]);
  values.number_places(values_[index]);
  lane.weighed.came = keys_[index];
  lane.weighed.values_came = values_[index];
}

std::vector<float> take_placed(HeadState& head, PlacedRows& rows, int known) {
  std::vector<std::pair<int, size_t>> order;  // numbers and places
  for (size_t place = 0; place < rows.sides[0].came.size(); ++place) {
    const int number = rows.sides[0].came[place];
    if (number < known) order.emplace_back(number, place);
  }
  std::sort(order.begin(), order.end());
  const bool under_way =
      std::any_of(rows.sides[0].came.begin(), rows.sides[0].came.end(),
                  [&](int number) { return number >= known && number != WeighedRows::kNoRow; });
  for (PlacedRows::Side& side : rows.sides) {
    std::replace_if(
        side.came.begin(), side.came.end(), [&](int number) { return number >= known; },
        WeighedRows::kNoRow);
    side.full -= under_way ? 1 : 0;
  }
  head.stores[kRest].keys.take_placed(rows.sides[0]);
  head.stores[kRest].values.take_placed(rows.sides[1]);
  // Numbers are those of slots before, so that what is read has not been written over.
  size_t tags = 0;
  for (const auto& [number, place] : order) {
    const auto at = static_cast<size_t>(number);
    if (at < head.tags.size()) head.tags[tags++] = head.tags[at];
  }
  head.tags.resize(tags);
  head.tags.resize(order.size(), kTextRow);
  std::vector<float> weights;
  if (rows.weights.empty()) return weights;  // the host has named the rows that went
  size_t scores = 0;
  for (const auto& [number, place] : order) {
    weights.push_back(rows.weights[place]);
    const auto at = static_cast<size_t>(number);
    if (at < head.scores.size()) head.scores[scores++] = head.scores[at];
  }
  head.scores.resize(scores);
  return weights;
}

}  // namespace kvlm
