#include "kvcache/engine/placed_rows.h"

#include <algorithm>
#include <span>

namespace kvlm {

namespace {

/// Inverts `came`: (known,) the place of each arrival number, -1 if that token was evicted.
std::vector<int> places_of(std::span<const int> came, int known) {
  std::vector<int> places(static_cast<size_t>(known), -1);
  for (size_t place = 0; place < came.size(); ++place) {
    if (came[place] < known) places[static_cast<size_t>(came[place])] = static_cast<int>(place);
  }
  return places;
}

/// Keeps the entries of `all` whose tokens, by arrival number, have a place.
template <class T>
void keep_numbers(std::span<const int> places, std::vector<T>& all) {
  size_t kept = 0;
  for (size_t number = 0; number < std::min(all.size(), places.size()); ++number) {
    if (places[number] >= 0) all[kept++] = all[number];
  }
  all.resize(kept);
}

}  // namespace

PlacedHeads::PlacedHeads(const CacheTraits& traits) : traits_(traits), held_(traits.kv_heads()) {}

void PlacedHeads::describe(const HeadState& head, int layer, size_t index,
                           const std::array<const float*, kStores>& queries, SegmentList& segments,
                           TableHead& table_head) {
  const StoreBuffers& rest = head.stores[kRest];
  table_head.placed = true;
  Held& held = held_[index];
  bool stays = false;  // some side has packed tokens in fixed segments
  for (const KvSide side : kSides) {
    const auto at = static_cast<size_t>(side);
    const int before = segments.size();
    held.fixed[at].clear();
    const KvBuffer& buffer = head.buffer(kRest, side);
    const bool by_host = traits_.host_flushes(layer, side);
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      if (store == kRest && !by_host) continue;
      SlotSegment* segment = add_places(head.buffer(store, side), at, store, held, segments);
      if (segment != nullptr && side == KvSide::kKeys) segment->q = queries[store];
    }
    const GrowingRows gained = by_host ? buffer.full_rows() : buffer.placed();
    (side == KvSide::kKeys ? table_head.keys : table_head.values) = segments.from(before);
    (side == KvSide::kKeys ? table_head.keys_gained : table_head.values_gained) = gained;
    stays = stays || by_host;
    table_head.fixed[at] = held.fixed[at];
  }
  if (!stays && table_head.keys.empty() && rest.keys.blocks.is_even() &&
      rest.values.blocks.is_even())
    return;
  number_rows(head, layer, held);
  table_head.weighed.came = held.came[0];
  table_head.weighed.values_came = held.came[1];
  table_head.weighed.first_places = head.stores[kVisual].keys.places();
}

/// Adds a segment of all packed tokens of a buffer, evicted ones included. Null if there are none.
SlotSegment* PlacedHeads::add_places(const KvBuffer& buffer, size_t side, size_t store, Held& held,
                                     SegmentList& segments) {
  const int rows = all_rows(buffer.blocks.all());
  if (rows == 0) return nullptr;
  std::vector<PackedBlock>& blocks = held.blocks[side][store];
  blocks.assign(buffer.blocks.all().begin(), buffer.blocks.all().end());
  for (PackedBlock& block : blocks) {
    const size_t bytes = buffer.layout().packed_bytes(block.rows);
    held.fixed[side].push_back({block.rows, block.live_rows, static_cast<int>(bytes)});
    block.live = nullptr;
    block.live_rows = block.rows;
  }
  SlotSegment& segment = segments.add();
  segment.slots = rows;
  segment.format = &buffer.layout().packing->format;
  segment.blocks = blocks;
  return &segment;
}

/// Fills in the arrival number of every place.
void PlacedHeads::number_rows(const HeadState& head, int layer, Held& held) {
  for (std::vector<int>& of_store : numbers_) of_store.clear();
  for (size_t slot = 0; slot < head.tags.size(); ++slot) {
    numbers_[traits_.store_of(head.tags[slot])].push_back(static_cast<int>(slot));
  }
  for (const KvSide side : kSides) {
    std::vector<int>& came = held.came[static_cast<size_t>(side)];
    came.clear();
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      const bool stays = store == kVisual || traits_.host_flushes(layer, side);
      head.buffer(store, side).number_places(numbers_[store], stays, came);
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
    const auto take_fixed = [&](KvBuffer& buffer) {
      const int fixed = all_rows(buffer.blocks.all());
      const auto end = of_side.came.begin() + fixed;
      if (fixed > 0) buffer.blocks.keep({of_side.came.begin(), end});
      of_side.came.erase(of_side.came.begin(), end);
    };
    take_fixed(head.buffer(kVisual, side));
    KvBuffer& rest = head.buffer(kRest, side);
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
  if (rows.weights.empty()) return weights;  // the host named the evicted tokens
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
