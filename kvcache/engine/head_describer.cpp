#include "kvcache/engine/head_describer.h"

#include <array>
#include <optional>

#include "kvcache/engine/table_load.h"
#include "kvcache/extensions/protected_values.h"

namespace kvlm {

namespace {

/// Most fixed segments of one side of a KV head (TableLoad).
constexpr size_t kMostFixed = 5;

}  // namespace

HeadDescriber::HeadDescriber(const CacheTraits& traits, KeyBasisChange& key_basis,
                             VisualRemap& remap, size_t number)
    : traits_(traits),
      key_basis_(key_basis),
      remap_(remap),
      first_(number * traits.kv_heads()),
      placed_(traits),
      heads_(traits.kv_heads()),
      segments_(traits.kv_heads() * 2 * kMostFixed) {}

std::span<const TableHead> HeadDescriber::describe(const Sequence& sequence, SequenceId id,
                                                   int layer) {
  SlotSegment* memory = segments_.data();
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    SegmentList segments(memory);
    describe_head(sequence, id, layer, h, segments);
    memory += segments.size();
  }
  return heads_;
}

void HeadDescriber::describe_head(const Sequence& sequence, SequenceId id, int layer, size_t h,
                                  SegmentList& segments) {
  const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const HeadState& head = state.heads[h];
  TableHead& table_head = heads_[h] = {};
  const size_t index = static_cast<size_t>(id) * traits_.kv_heads() + h;
  table_head.remaps = remap_.describe(first_ + h, head.stores[kVisual], layer, sequence.placed);
  if (sequence.placed) {
    const std::array<const float*, kStores> queries = {key_basis_.queries_of(layer, kVisual, index),
                                                       key_basis_.queries_of(layer, kRest, index)};
    placed_.describe(head, layer, h, queries, segments, table_head);
  } else {
    describe_segments(head, layer, index, sequence.told_anew, segments, table_head);
  }
  if (sequence.told_anew) {
    table_head.weighed.weights = head.weights;
    table_head.weighed.by_slots = true;
  } else if (traits_.table().weighs || traits_.table().scores) {
    describe_weighed(sequence, layer, h, table_head);
  }
  if (state.sink_rows == 0) return;
  const size_t before = h * static_cast<size_t>(state.sink_rows) * traits_.dim();
  table_head.turned = {state.sinks + before, state.sink_rows, state.rotated_by};
}

/// Metadata for eviction by weight, with tokens numbered as at the prompt's end, or by score, for
/// the remaining prompt tokens.
void HeadDescriber::describe_weighed(const Sequence& sequence, int layer, size_t head,
                                     TableHead& table_head) const {
  const std::vector<HeadState>& heads = sequence.layers[static_cast<size_t>(layer)].heads;
  const std::optional<LeastWeight> least = least_weight(traits_, sequence, layer);
  if (least) table_head.weighed.least = *least;  // otherwise no token is evicted by score any more
  if (traits_.table().scores) {
    table_head.weighed.scores = heads[traits_.layouts().per_head() ? head : 0].scores;
    return;
  }
  table_head.weighed.weights = heads[head].weights;
  if (sequence.came.empty() || sequence.placed) return;
  table_head.weighed.came = sequence.came[static_cast<size_t>(layer) * traits_.kv_heads() + head];
}

/// The fixed segments of a KV head without in-place eviction, and its growing part.
void HeadDescriber::describe_segments(const HeadState& head, int layer, size_t index,
                                      bool told_anew, SegmentList& segments,
                                      TableHead& table_head) {
  for (const KvSide side : kSides) {
    const int before = segments.size();
    const bool by_host = told_anew || traits_.host_flushes(layer, side);
    for (size_t store = traits_.first_store(); store < kStores; ++store) {
      const KvBuffer& buffer = head.buffer(store, side);
      const int first = segments.size();
      if (store == kVisual || by_host) {
        add_packed(head, store, side, layer, segments);
      } else {
        buffer.blocks.add_elsewhere(segments);
      }
      if (side == KvSide::kKeys && segments.size() > first) {
        segments[first].q = key_basis_.queries_of(layer, store, index);
      }
      if (store == kVisual) buffer.ring.add_to(segments, buffer.layout().dtype);
    }
    const KvBuffer& rest = head.buffer(kRest, side);
    const GrowingRows gained = by_host ? rest.full_rows() : rest.growing();
    (side == KvSide::kKeys ? table_head.keys : table_head.values) = segments.from(before);
    (side == KvSide::kKeys ? table_head.keys_gained : table_head.values_gained) = gained;
  }
}

/// Adds the packed tokens of a store; protected values have blocks of their own.
void HeadDescriber::add_packed(const HeadState& head, size_t store, KvSide side, int layer,
                               SegmentList& segments) const {
  if (store == kRest && side == KvSide::kValues && traits_.layer(layer).protects) {
    ProtectedValues::add_packed(head, segments);
  } else {
    head.buffer(store, side).blocks.add_to(segments);
  }
}

}  // namespace kvlm
