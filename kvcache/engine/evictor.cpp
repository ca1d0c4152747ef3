#include "kvcache/engine/evictor.h"

#include <algorithm>
#include <cstdint>

#include "kvcache/engine/least_score.h"
#include "kvcache/extensions/protected_values.h"

namespace kvlm {

Evictor::Evictor(const CacheTraits& traits, DecodeWeights& weights, SinkRotation& sinks)
    : traits_(traits), weights_(weights), sinks_(sinks), dropped_(traits.layers()) {}

void Evictor::reserve(const Workload& load) {
  if (traits_.retention() == nullptr) return;
  // Each evicted slot leaves gaps in keys, values and weights.
  gaps_.reserve(kGapsTogether + traits_.kv_heads() * traits_.layers() * 3);
  weights_.reserve(load);
}

void Evictor::evict(std::span<Sequence* const> sequences, Stream& stream) {
  if (traits_.retention() == nullptr || sequences.empty()) return;
  weights_.collect(sequences, 0, traits_.shape().layers, stream);
  for (Sequence* sequence : sequences) {
    const int step = sequence->rows + 1 - sequence->prompt_rows;
    for (int layer = 0; layer < traits_.shape().layers; ++layer) {
      evict_from(*sequence, layer, step, stream);
    }
    if (gaps_.size() >= kGapsTogether || sequence == sequences.back()) close_gaps_left(stream);
  }
}

void Evictor::evict_layer(Sequence& sequence, int layer, int newer, Stream& stream) {
  if (traits_.retention() == nullptr) return;
  Sequence* const self = &sequence;
  weights_.collect({&self, 1}, layer, layer + 1, stream);
  evict_from(sequence, layer, sequence.rows + newer - sequence.prompt_rows, stream);
  close_gaps_left(stream);
}

/// Evicts the slot that the rule names, if any. Layers of a pair evict the slot of their first
/// layer.
void Evictor::evict_from(Sequence& sequence, int layer, int step, Stream& stream) {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  DecodeView view;
  view.prompt_rows = sequence.prompt_rows;
  view.step = step;
  view.kept = state.kept;
  view.forget = state.forget;
  view.tail = state.tail;
  const bool per_head = traits_.layouts().per_head();
  int slot = -1;
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    if (h == 0 || per_head) slot = choose(state, layer, h, view, stream);
    if (slot < 0 && per_head) continue;
    if (slot < 0) return;
    HeadState& head = state.heads[h];
    const int value = evict_slot(state, head, slot);
    // A bitmap shared by all KV heads is changed once, after all have read it.
    const bool last_of_bitmap = per_head || h + 1 == traits_.kv_heads();
    if (value >= 0 && last_of_bitmap) ProtectedValues::erase(head, value);
  }
}

/// The slot that a KV head evicts, or -1; it may hold for all heads of the layer.
int Evictor::choose(LayerState& state, int layer, size_t head, DecodeView& view, Stream& stream) {
  const int pair = traits_.pair_of(layer);
  if (head == 0 && pair != layer) return dropped_[static_cast<size_t>(pair)];
  HeadState& of = state.heads[head];
  view.rows = of.slots();
  if (of.weights != nullptr) view.weights = weights_.next(of);
  view.scored = static_cast<int>(of.scores.size());
  int slot = traits_.retention()->evict(view);
  if (slot == kLeastScore) {
    slot = least_scored(*traits_.retention()->least_weight(view), of.scores);
  }
  if (head == 0) dropped_[static_cast<size_t>(layer)] = slot;
  if (slot >= 0 && head == 0 && traits_.retention()->rerotates()) {
    sinks_.rotate(state, slot, 1, stream);
  }
  return slot;
}

/// Evicts a slot, counted in token order. Returns the index among the value slots of kRest if some
/// are protected, else -1.
int Evictor::evict_slot(LayerState& state, HeadState& head, int slot) {
  const size_t store = traits_.store_of(head.tags[static_cast<size_t>(slot)]);
  const int at = slot_in_store(head, store, slot);
  head.tags.erase(head.tags.begin() + slot);
  if (static_cast<size_t>(slot) < head.scores.size()) {
    head.scores.erase(head.scores.begin() + slot);
  }
  evict_weight(head, store, at);
  const auto evict_from_buffer = [&](KvBuffer& buffer, int row) {
    state.buffer_bytes -= buffer.bytes();
    const RowGap gap = buffer.evict(row);
    state.buffer_bytes += buffer.bytes();
    if (gap.ring != nullptr) gaps_.push_back(gap);
  };
  evict_from_buffer(head.stores[store].keys, at);
  if (store == kRest) {
    ProtectedValues::evict(head, at, evict_from_buffer);
  } else {
    evict_from_buffer(head.stores[store].values, at);
  }
  return store == kRest && head.protected_bits != nullptr ? at : -1;
}

void Evictor::evict_weight(HeadState& head, size_t store, int at) {
  if (head.weights == nullptr) return;
  const int before = store == kRest ? head.stores[kVisual].keys.slots() : 0;
  gaps_.push_back({reinterpret_cast<std::byte*>(head.weights), sizeof(float), head.slots(), 0,
                   head.slots(), before + at, /*from_front=*/false});
}

int Evictor::slot_in_store(const HeadState& head, size_t store, int slot) const noexcept {
  if (!traits_.plan().split) return slot;
  return static_cast<int>(
      std::count_if(head.tags.begin(), head.tags.begin() + slot,
                    [&](int16_t tag) { return traits_.store_of(tag) == store; }));
}

void Evictor::close_gaps_left(Stream& stream) {
  close_gaps(gaps_, stream);
  gaps_.clear();
}

}  // namespace kvlm
