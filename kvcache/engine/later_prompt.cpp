#include "kvcache/engine/later_prompt.h"

#include "kernels/column_sums.h"

namespace kvlm {

LaterPrompt::LaterPrompt(const CacheTraits& traits, Unpacker& unpacker, RowAppender& appender,
                         WindowPacker& packer, Evictor& evictor)
    : traits_(traits),
      unpacker_(unpacker),
      appender_(appender),
      packer_(packer),
      evictor_(evictor),
      floats_(traits.device()) {}

void LaterPrompt::attend(Sequence& sequence, const StepRows& rows, int layer, ConstTensorView q,
                         ConstTensorView k, ConstTensorView v, TensorView out, float scale,
                         Stream& stream) {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  unpack(state, layer, stream);
  // Before attention: its output may take the place of the queries.
  if (traits_.layouts().keeps_weights()) sum_weights(state, q, k, scale, stream);
  attention(out, q, k, v, past_, /*causal=*/true, scale, traits_.shape().multiply, stream);
  for (int row = 0; row < rows.rows; ++row) {
    store_row(sequence, rows, row, layer, k, v, stream);
  }
}

/// Makes floats of what a layer has stored, for the time of one call.
void LaterPrompt::unpack(const LayerState& state, int layer, Stream& stream) {
  size_t stored = 0;
  for (const HeadState& head : state.heads) stored += static_cast<size_t>(head.slots());
  floats_.grow(2 * stored * traits_.dim());
  float* keys = floats_.data();
  past_.clear();
  for (const HeadState& head : state.heads) {
    const size_t elements = static_cast<size_t>(head.slots()) * traits_.dim();
    float* values = keys + elements;
    unpacker_.unpack_head(head, layer, keys, values, stream);
    past_.push_back({reinterpret_cast<const std::byte*>(keys),
                     reinterpret_cast<const std::byte*>(values), DType::kF32, head.slots()});
    keys = values + elements;
  }
}

/// Adds the attention of the new rows to the sums of stored slots, or puts that of the last one in
/// their place; keeps that of new ones.
void LaterPrompt::sum_weights(LayerState& state, ConstTensorView q, ConstTensorView k, float scale,
                              Stream& stream) {
  const auto past = static_cast<size_t>(state.heads[0].slots());
  const size_t columns = past + static_cast<size_t>(k.shape()[0]);
  sums_.assign(traits_.kv_heads() * columns, 0.0);
  const bool summed = traits_.layouts().sums_weights();
  const int64_t first_row = summed ? 0 : k.shape()[0] - 1;
  column_sums({sums_, {}}, q, k, past_, first_row, scale, traits_.shape().multiply, stream);
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    for (size_t j = 0; j < past; ++j) {
      float& weight = state.heads[h].weights[j];
      weight = (summed ? weight : 0) + static_cast<float>(sums_[h * columns + j]);
    }
  }
}

/// Appends a row and does what follows it in a step of decode.
void LaterPrompt::store_row(Sequence& sequence, const StepRows& rows, int row, int layer,
                            ConstTensorView k, ConstTensorView v, Stream& stream) {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const int16_t tag = rows.modality.empty() ? kTextRow : rows.modality[static_cast<size_t>(row)];
  appender_.append(state, layer, tag, 0);
  appender_.store(k.slice(row, 1), v.slice(row, 1), 0, stream);
  if (traits_.layouts().keeps_weights()) {
    const size_t columns = sums_.size() / traits_.kv_heads();
    const size_t column = columns - static_cast<size_t>(rows.rows - row);
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      DecodeWeights::newest(state.heads[h], traits_.store_of(tag)) =
          static_cast<float>(sums_[h * columns + column]);
    }
  }
  Sequence* const self = &sequence;
  packer_.flush({&self, 1}, layer, stream);
  evictor_.evict_layer(sequence, layer, row + 1, stream);
}

}  // namespace kvlm
