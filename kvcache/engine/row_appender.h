#pragma once

#include <cstddef>
#include <vector>

#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Appends rows to what is stored, as full rows.
class RowAppender {
 public:
  explicit RowAppender(const CacheTraits& traits) : traits_(traits) {}

  void reserve(const Workload& load);
  /// Room for `rows` rows of a layer.
  void reserve_rows(size_t rows);
  /// Makes room for a row in every KV head of a layer, which store() fills as those from number
  /// `first` on. Different numbers may be used by several threads.
  void append(LayerState& state, int layer, int16_t tag, size_t first);
  /// Stores rows that append() made room for, (rows, kv_heads, head_dim) of each.
  void store(ConstTensorView k, ConstTensorView v, size_t first, Stream& stream);

 private:
  const CacheTraits& traits_;
  std::vector<std::byte*> keys_;  // (rows of a step, kv_heads)
  std::vector<std::byte*> values_;
};

}  // namespace kvlm
