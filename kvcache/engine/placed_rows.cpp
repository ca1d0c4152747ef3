#include "kvcache/engine/placed_rows.h"

#include <algorithm>
#include <utility>

namespace kvlm {

namespace {

constexpr std::array kSides{KvSide::kKeys, KvSide::kValues};

/// A run of all rows of a plane that is packed once, those that have gone among them.
void add_places(const Plane& plane, std::vector<PackedBlock>& blocks, RunList& runs) {
  if (plane.places() == 0) return;
  blocks.assign(plane.blocks().begin(), plane.blocks().end());
  for (PackedBlock& block : blocks) {
    block.live = nullptr;
    block.live_rows = block.rows;
  }
  SlotRun& run = runs.add();
  run.slots = plane.places();
  run.format = &plane.layout().packing->format;
  run.blocks = blocks;
}

}  // namespace

PlacedLanes::PlacedLanes(const CacheTraits& traits) : traits_(traits), held_(traits.kv_heads()) {}

void PlacedLanes::describe(const HeadState& head, size_t index, RunList& runs, TableLane& lane) {
  const StorePlanes& rest = head.stores[kRest];
  const StorePlanes& visual = head.stores[kVisual];
  lane.placed = true;
  lane.keys_gained = rest.keys.placed();
  lane.values_gained = rest.values.placed();
  Held& held = held_[index];
  add_places(visual.keys, held.blocks[0], runs);
  lane.keys = runs.from(0);
  add_places(visual.values, held.blocks[1], runs);
  lane.values = runs.from(static_cast<int>(lane.keys.size()));
  if (lane.keys.empty() && rest.keys.is_even() && rest.values.is_even()) return;
  number_rows(head, held);
  lane.weighed.came = held.came[0];
  lane.weighed.values_came = held.came[1];
  held.fixed.clear();
  for (size_t b = 0; b < visual.keys.blocks().size(); ++b) {
    const PackedBlock& block = visual.keys.blocks()[b];
    const size_t bytes = visual.keys.layout().packed_bytes(block.rows) +
                         visual.values.layout().packed_bytes(block.rows);
    held.fixed.push_back({block.rows, block.live_rows, static_cast<int>(bytes)});
  }
  lane.fixed = held.fixed;
}

/// Numbers rows in the order of the tokens.
void PlacedLanes::number_rows(const HeadState& head, Held& held) {
  for (std::vector<int>& of_store : numbers_) of_store.clear();
  for (size_t slot = 0; slot < head.tags.size(); ++slot) {
    numbers_[traits_.store_of(head.tags[slot])].push_back(static_cast<int>(slot));
  }
  for (const KvSide side : kSides) {
    std::vector<int>& came = held.came[static_cast<size_t>(side)];
    came.clear();
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      head.plane(store, side).number_places(numbers_[store], came);
    }
  }
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
  const int fixed_places = head.stores[kVisual].keys.places();
  for (const KvSide side : kSides) {
    PlacedRows::Side& of_side = rows.sides[static_cast<size_t>(side)];
    Plane& visual = head.plane(kVisual, side);
    const auto fixed = static_cast<size_t>(visual.places());
    if (fixed > 0) visual.keep_placed(std::span(of_side.came).first(fixed));
    of_side.came.erase(of_side.came.begin(),
                       of_side.came.begin() + static_cast<std::ptrdiff_t>(fixed));
    head.plane(kRest, side).take_placed(of_side);
  }
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
    const auto at = static_cast<size_t>(number);
    if (at < head.scores.size()) head.scores[scores++] = head.scores[at];
  }
  head.scores.resize(scores);
  std::stable_partition(order.begin(), order.end(), [&](const auto& row) {
    return row.second < static_cast<size_t>(fixed_places);
  });
  for (const auto& [number, place] : order) weights.push_back(rows.weights[place]);
  return weights;
}

}  // namespace kvlm
