#include "kvcache/extensions/sink_rotation.h"

#include <cassert>

namespace kvlm {

SinkRotation::SinkRotation(const CacheTraits& traits) : traits_(traits) {
  if (traits.retention() == nullptr) return;
  const auto sinks = static_cast<size_t>(traits.retention()->most_sinks());
  sources_.reserve(traits.kv_heads() * sinks);
  rotated_.reserve(traits.kv_heads() * sinks);
}

void SinkRotation::place(LayerState& state, std::byte* memory) noexcept {
  state.sinks = reinterpret_cast<float*>(memory);
}

void SinkRotation::rotate(LayerState& state, int sinks, int by, Stream& stream) {
  if (state.sink_rows == 0) copy_sinks(state, sinks, stream);
  state.rotated_by += by;
  rotated_.clear();
  const float* from = state.sinks;
  for (HeadState& head : state.heads) {
    for (int row = 0; row < state.sink_rows; ++row) {
      rotated_.push_back({from, head.stores[kRest].keys.ring.row(row)});
      from += traits_.dim();
    }
  }
  turn_rows(rotated_, traits_.plan().rows, traits_.shape().rope_frequencies, state.rotated_by,
            stream);
}

/// Saves the sinks' original keys. Every rotation starts from them, so that rounding errors do not
/// add up.
void SinkRotation::copy_sinks(LayerState& state, int sinks, Stream& stream) {
  assert(sinks <= traits_.retention()->most_sinks());
  state.sink_rows = sinks;
  sources_.clear();
  for (HeadState& head : state.heads) {
    for (int row = 0; row < sinks; ++row) {
      sources_.push_back(head.stores[kRest].keys.ring.row(row));
    }
  }
  widen_rows(sources_, traits_.plan().rows, traits_.shape().head_dim, state.sinks, stream);
}

}  // namespace kvlm
