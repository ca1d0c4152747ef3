#include "kvcache/engine/placed_rows.h"

#include <algorithm>
#include <span>

namespace kvlm {

namespace {

/// The places of the rows of a number of the rows, in their order, that are known: (numbers,), -1
/// where there is none.
std::vector<int> places_of(std::span<const int> came, int known) {
  std::vector<int> places(static_cast<size_t>(known), -1);
  for (size_t place = 0; place < came.size(); ++place) {
    if (came[place] < known) places[static_cast<size_t>(came[place])] = static_cast<int>(place);
  }
  return places;
}

/// Keeps the entries of `all` whose rows, by number, have a place.
template <class T>
void keep_numbers(std::span<const int> places, std::vector<T>& all) {
  size_t kept = 0;
  for (size_t number = 0; number < std::min(all.size(), places.size()); ++number) {
    if (places[number] >= 0) all[kept++] = all[number];
  }
  all.resize(kept);
}

}  // namespace

PlacedLanes::PlacedLanes(const CacheTraits& traits) : traits_(traits), held_(traits.kv_heads()) {}

void PlacedLanes::describe(const HeadState& head, int layer, size_t index,
                           const std::array<const float*, kStores>& queries, RunList& runs,
                           TableLane& lane) {
  const StorePlanes& rest = head.stores[kRest];
  lane.placed = true;
  Held& held = held_[index];
  bool stays = false;  // packed rows of some side do, where they are
  for (const KvSide side : kSides) {
    const auto at = static_cast<size_t>(side);
    const int before = runs.size();
    held.fixed[at].clear();
    const Plane& plane = head.plane(kRest, side);
    const bool by_host = traits_.host_flushes(layer, side);
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      if (store == kRest && !by_host) continue;
      SlotRun* run = add_places(head.plane(store, side), at, store, held, runs);
      if (run != nullptr && side == KvSide::kKeys) run->q = queries[store];
    }
    const GrowingRows gained = by_host ? plane.full_rows() : plane.placed();
    (side == KvSide::kKeys ? lane.keys : lane.values) = runs.from(before);
    (side == KvSide::kKeys ? lane.keys_gained : lane.values_gained) = gained;
    stays = stays || by_host;
    lane.fixed[at] = held.fixed[at];
  }
  if (!stays && lane.keys.empty() && rest.keys.blocks.is_even() && rest.values.blocks.is_even())
    return;
  number_rows(head, layer, held);
  lane.weighed.came = held.came[0];
  lane.weighed.values_came = held.came[1];
  lane.weighed.first_places = head.stores[kVisual].keys.places();
}

/// Adds a run of all rows of a plane that are packed, those that have gone among them; null: there
/// are none.
SlotRun* PlacedLanes::add_places(const Plane& plane, size_t side, size_t store, Held& held,
                                 RunList& runs) {
  const int rows = all_rows(plane.blocks.all());
  if (rows == 0) return nullptr;
  std::vector<PackedBlock>& blocks = held.blocks[side][store];
  blocks.assign(plane.blocks.all().begin(), plane.blocks.all().end());
  for (PackedBlock& block : blocks) {
    const size_t bytes = plane.layout().packed_bytes(block.rows);
    held.fixed[side].push_back({block.rows, block.live_rows, static_cast<int>(bytes)});
    block.live = nullptr;
    block.live_rows = block.rows;
  }
  SlotRun& run = runs.add();
  run.slots = rows;
  run.format = &plane.layout().packing->format;
  run.blocks = blocks;
  return &run;
}

/// Numbers rows in the order of the tokens.
void PlacedLanes::number_rows(const HeadState& head, int layer, Held& held) {
  for (std::vector<int>& of_store : numbers_) of_store.clear();
  for (size_t slot = 0; slot < head.tags.size(); ++slot) {
    numbers_[traits_.store_of(head.tags[slot])].push_back(static_cast<int>(slot));
  }
  for (const KvSide side : kSides) {
    std::vector<int>& came = held.came[static_cast<size_t>(side)];
    came.clear();
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      const bool stays = store == kVisual || traits_.host_flushes(layer, side);
      head.plane(store, side).number_places(numbers_[store], stays, came);
    }
  }
}

std::vector<float> take_placed(const LayerTraits& of, HeadState& head, PlacedRows& rows,
                               int known) {
  const std::vector<int> places = places_of(rows.sides[0].came, known);
  const auto is_newer = [&](int number) { return number >= known; };
  const std::vector<int>& came = rows.sides[0].came;
  const bool under_way = std::any_of(came.begin(), came.end(), [&](int number) {
    return is_newer(number) && number != WeighedRows::kNoRow;
  });
  const int first_places = head.stores[kVisual].keys.places();
  for (const KvSide side : kSides) {
    PlacedRows::Side& of_side = rows.sides[static_cast<size_t>(side)];
    std::replace_if(of_side.came.begin(), of_side.came.end(), is_newer, WeighedRows::kNoRow);
    of_side.full -= under_way ? 1 : 0;
    const auto take_fixed = [&](Plane& plane) {
      const int fixed = all_rows(plane.blocks.all());
      const auto end = of_side.came.begin() + fixed;
      if (fixed > 0) plane.blocks.keep({of_side.came.begin(), end});
      of_side.came.erase(of_side.came.begin(), end);
    };
    take_fixed(head.plane(kVisual, side));
    Plane& rest = head.plane(kRest, side);
    if (!of.host_flushes[static_cast<size_t>(side)]) {
      rest.take_placed(of_side);
      continue;
    }
    take_fixed(rest);
    rest.ring.take(of_side.first, of_side.full);
  }
  keep_numbers(places, head.tags);
  const auto left = std::count_if(places.begin(), places.end(), [](int at) { return at >= 0; });
  head.tags.resize(static_cast<size_t>(left), kTextRow);
  std::vector<float> weights;
  if (rows.weights.empty()) return weights;  // the host has named the rows that went
  keep_numbers(places, head.scores);
  for (const bool first : {true, false}) {
    for (const int place : places) {
      if (place < 0 || (place < first_places) != first) continue;
      weights.push_back(rows.weights[static_cast<size_t>(place)]);
    }
  }
  return weights;
}

}  // namespace kvlm
