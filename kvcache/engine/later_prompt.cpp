#include "kvcache/engine/later_prompt.h"

#include <algorithm>
#include <cassert>

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
  if (!find_stored(state)) unpack(state, layer, stream);
  // Before attention, whose output may overwrite the queries.
  if (traits_.layouts().keeps_weights()) sum_weights(state, q, k, scale, stream);
  attention(out, q, k, v, past_, /*causal=*/true, scale, traits_.shape().multiply, stream);
  for (int row = 0; row < rows.rows;) {
    const int count = rows_at_once(state, layer, rows.rows - row);
    store_rows(sequence, rows, row, count, layer, k, v, stream);
    row += count;
  }
}

/// Refers to the stored tokens of a layer in place, if all are unpacked, contiguous and in one
/// store. Otherwise returns false.
bool LaterPrompt::find_stored(const LayerState& state) {
  past_.clear();
  for (const HeadState& head : state.heads) {
    const StoreBuffers& rest = head.stores[kRest];
    const int rows = rest.keys.full();
    const bool lies = head.slots() == rows && rest.full_alike(/*protects=*/true) &&
                      rest.keys.ring.before_wrap() == rows;
    if (!lies) return false;
    past_.push_back({rest.keys.ring.row(0), rest.values.ring.row(0), traits_.plan().rows, rows});
  }
  return true;
}

/// Unpacks the stored tokens of a layer to floats, valid for one call.
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

/// Adds the new tokens' attention to the sums of stored slots, or replaces the weights by those of
/// the last token. New slots get theirs, too.
void LaterPrompt::sum_weights(LayerState& state, ConstTensorView q, ConstTensorView k, float scale,
                              Stream& stream) {
  assert(!traits_.on_gpu());  // on a GPU such rules refuse a second prompt
  const auto past = static_cast<size_t>(state.heads[0].slots());
  const size_t columns = past + static_cast<size_t>(k.shape()[0]);
  sums_.resize(traits_.kv_heads() * columns);
  const bool summed = traits_.layouts().sums_weights();
  const int64_t first_row = summed ? 0 : k.shape()[0] - 1;
  column_sums({sums_.data(), static_cast<int64_t>(columns)}, q, k, past_, first_row, scale,
              traits_.shape().multiply, stream);
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    for (size_t j = 0; j < past; ++j) {
      float& weight = state.heads[h].weights[j];
      weight = (summed ? weight : 0) + static_cast<float>(sums_[h * columns + j]);
    }
  }
}

/// How many of `left` tokens can be stored before the next flush or eviction.
int LaterPrompt::rows_at_once(const LayerState& state, int layer, int left) const noexcept {
  if (traits_.retention() != nullptr) return 1;
  int rows = left;
  for (const Window& window : traits_.layer(layer).windows) {
    for (const HeadState& head : state.heads) {
      const int full = head.buffer(window.store, window.side).full();
      rows = std::min(rows, std::max(1, window.packing->flush.trigger - full));
    }
  }
  return rows;
}

/// Stores `count` tokens from `row` on, then flushes and evicts as a decode step does.
void LaterPrompt::store_rows(Sequence& sequence, const StepRows& rows, int row, int count,
                             int layer, ConstTensorView k, ConstTensorView v, Stream& stream) {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const size_t heads = traits_.kv_heads();
  int16_t tag = kTextRow;
  appender_.reserve_rows(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    if (!rows.modality.empty()) tag = rows.modality[static_cast<size_t>(row + i)];
    appender_.append(state, layer, tag, static_cast<size_t>(i) * heads);
  }
  appender_.store(k.slice(row, count), v.slice(row, count), 0, stream);
  if (traits_.layouts().keeps_weights()) {
    const size_t columns = sums_.size() / heads;
    const size_t column = columns - static_cast<size_t>(rows.rows - row);
    for (size_t h = 0; h < heads; ++h) {
      DecodeWeights::newest(state.heads[h], traits_.store_of(tag)) =
          static_cast<float>(sums_[h * columns + column]);
    }
  }
  Sequence* const self = &sequence;
  packer_.flush({&self, 1}, layer, stream);
  evictor_.evict_layer(sequence, layer, row + count, stream);
}

}  // namespace kvlm
