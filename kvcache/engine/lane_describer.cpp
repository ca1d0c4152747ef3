#include "kvcache/engine/lane_describer.h"

#include <array>
#include <optional>

#include "kvcache/engine/table_load.h"
#include "kvcache/extensions/protected_values.h"

namespace kvlm {

namespace {

/// Fixed runs of a lane's side, at most (TableLoad).
constexpr size_t kMostFixed = 5;

}  // namespace

LaneDescriber::LaneDescriber(const CacheTraits& traits, KeyBasisChange& key_basis,
                             VisualRemap& remap, size_t number)
    : traits_(traits),
      key_basis_(key_basis),
      remap_(remap),
      first_(number * traits.kv_heads()),
      placed_(traits),
      lanes_(traits.kv_heads()),
      runs_(traits.kv_heads() * 2 * kMostFixed) {}

std::span<const TableLane> LaneDescriber::describe(const Sequence& sequence, SequenceId id,
                                                   int layer) {
  SlotRun* memory = runs_.data();
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    RunList runs(memory);
    describe_lane(sequence, id, layer, h, runs);
    memory += runs.size();
  }
  return lanes_;
}

/// One KV head of a layer.
void LaneDescriber::describe_lane(const Sequence& sequence, SequenceId id, int layer, size_t h,
                                  RunList& runs) {
  const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const HeadState& head = state.heads[h];
  TableLane& lane = lanes_[h] = {};
  const size_t index = static_cast<size_t>(id) * traits_.kv_heads() + h;
  lane.remaps = remap_.describe(first_ + h, head.stores[kVisual], layer, sequence.placed);
  if (sequence.placed) {
    const std::array<const float*, kStores> queries = {key_basis_.queries_of(layer, kVisual, index),
                                                       key_basis_.queries_of(layer, kRest, index)};
    placed_.describe(head, layer, h, queries, runs, lane);
  } else {
    describe_runs(head, layer, index, sequence.told_anew, runs, lane);
  }
  if (sequence.told_anew) {
    lane.weighed.weights = head.weights;
    lane.weighed.by_slots = true;
  } else if (traits_.table().weighs || traits_.table().scores) {
    describe_weighed(sequence, layer, h, lane);
  }
  if (state.sink_rows == 0) return;
  const size_t before = h * static_cast<size_t>(state.sink_rows) * traits_.dim();
  lane.turned = {state.sinks + before, state.sink_rows, state.rotated_by};
}

/// Rows that go by weight, which have the numbers that they had when the prompt ended, or by score:
/// those of the prompt that are left.
void LaneDescriber::describe_weighed(const Sequence& sequence, int layer, size_t head,
                                     TableLane& lane) const {
  const std::vector<HeadState>& heads = sequence.layers[static_cast<size_t>(layer)].heads;
  const std::optional<LeastWeight> least = least_weight(traits_, sequence, layer);
  if (least) lane.weighed.least = *least;  // else none goes by score any more
  if (traits_.table().scores) {
    lane.weighed.scores = heads[traits_.layouts().per_head() ? head : 0].scores;
    return;
  }
  lane.weighed.weights = heads[head].weights;
  if (sequence.came.empty() || sequence.placed) return;
  lane.weighed.came = sequence.came[static_cast<size_t>(layer) * traits_.kv_heads() + head];
}

/// The fixed runs of a KV head that is not placed, and what it gains.
void LaneDescriber::describe_runs(const HeadState& head, int layer, size_t index, bool told_anew,
                                  RunList& runs, TableLane& lane) {
  for (const KvSide side : kSides) {
    const int before = runs.size();
    const bool by_host = told_anew || traits_.host_flushes(layer, side);
    for (size_t store = traits_.first_store(); store < kStores; ++store) {
      const Plane& plane = head.plane(store, side);
      const int first = runs.size();
      if (store == kVisual || by_host) {
        add_packed(head, store, side, layer, runs);
      } else {
        plane.blocks.add_elsewhere(runs);
      }
      if (side == KvSide::kKeys && runs.size() > first) {
        runs[first].q = key_basis_.queries_of(layer, store, index);
      }
      if (store == kVisual) plane.ring.add_to(runs, plane.layout().dtype);
    }
    const Plane& rest = head.plane(kRest, side);
    const GrowingRows gained = by_host ? rest.full_rows() : rest.growing();
    (side == KvSide::kKeys ? lane.keys : lane.values) = runs.from(before);
    (side == KvSide::kKeys ? lane.keys_gained : lane.values_gained) = gained;
  }
}

/// The packed rows of a store, of which some values may lie apart.
void LaneDescriber::add_packed(const HeadState& head, size_t store, KvSide side, int layer,
                               RunList& runs) const {
  if (store == kRest && side == KvSide::kValues && traits_.layer(layer).protects) {
    ProtectedValues::add_packed(head, runs);
  } else {
    head.plane(store, side).blocks.add_to(runs);
  }
}

}  // namespace kvlm
