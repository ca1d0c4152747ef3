#include "kvcache/extensions/sink_rotation.h"

namespace kvlm {

void SinkRotation::rotate(LayerState& state, int sinks, int by, Stream& stream) {
  if (state.sink_rows == 0) copy_sinks(state, sinks, stream);
  state.rotated_by += by;
  rotated_.clear();
  const auto* from = reinterpret_cast<const float*>(state.sinks.data());
  for (HeadState& head : state.heads) {
    for (int row = 0; row < state.sink_rows; ++row) {
      rotated_.push_back({from, head.stores[kRest].keys.full_row(row)});
      from += traits_.dim();
    }
  }
  turn_rows(rotated_, traits_.plan().rows, traits_.shape().rope_frequencies, state.rotated_by,
            stream);
}

/// Keeps the sinks' keys as they came: each rotation starts from them, so that roundings do not
/// add up.
void SinkRotation::copy_sinks(LayerState& state, int sinks, Stream& stream) {
  const size_t rows = traits_.kv_heads() * static_cast<size_t>(sinks);
  state.sink_rows = sinks;
  state.sinks = Buffer(traits_.device(), rows * traits_.dim() * sizeof(float));
  sources_.clear();
  for (HeadState& head : state.heads) {
    for (int row = 0; row < sinks; ++row) {
      sources_.push_back(head.stores[kRest].keys.full_row(row));
    }
  }
  widen_rows(sources_, traits_.plan().rows, traits_.shape().head_dim,
             reinterpret_cast<float*>(state.sinks.data()), stream);
}

}  // namespace kvlm
