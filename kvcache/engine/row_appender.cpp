#include "kvcache/engine/row_appender.h"

#include <algorithm>
#include <span>

#include "kernels/base/tensor.h"
#include "kernels/row_moves.h"
#include "kvcache/extensions/decode_weights.h"

namespace kvlm {

void RowAppender::reserve(const Workload& load) {
  keys_.resize(std::max(keys_.size(), load.heads));
  values_.resize(keys_.size());
}

void RowAppender::reserve_rows(size_t rows) {
  keys_.resize(std::max(keys_.size(), rows * traits_.kv_heads()));
  values_.resize(keys_.size());
}

void RowAppender::append(LayerState& state, int layer, int16_t tag, size_t first) {
  const size_t store = traits_.store_of(tag);
  state.due = {};
  state.buffer_bytes += 2 * traits_.kv_heads() * traits_.row_bytes();
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    HeadState& head = state.heads[h];
    keys_[first + h] = head.stores[store].keys.ring.push();
    values_[first + h] = head.stores[store].values.ring.push();
    for (const Window& window : traits_.layer(layer).windows) {
      const KvBuffer& buffer = head.buffer(window.store, window.side);
      if (buffer.full() < window.packing->flush.trigger) continue;
      ++state.due[window.store][static_cast<size_t>(window.side)];
    }
    if (traits_.retention() == nullptr) continue;
    head.tags.push_back(tag);
    DecodeWeights::insert(head, store);
  }
}

void RowAppender::store(ConstTensorView k, ConstTensorView v, size_t first, Stream& stream) {
  const DType dtype = traits_.plan().rows;
  const int dim = traits_.shape().head_dim;
  const size_t heads = static_cast<size_t>(k.shape()[0]) * traits_.kv_heads();
  narrow_rows(std::span(keys_).subspan(first, heads), dtype, dim, k.as<float>(), stream);
  narrow_rows(std::span(values_).subspan(first, heads), dtype, dim, v.as<float>(), stream);
}

}  // namespace kvlm
