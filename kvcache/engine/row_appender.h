#pragma once

#include <cstddef>
#include <vector>

#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Appends unpacked tokens to K and V buffers.
class RowAppender {
 public:
  explicit RowAppender(const CacheTraits& traits) : traits_(traits) {}

  void reserve(const Workload& load);
  /// Allocates lists for `rows` tokens of a layer.
  void reserve_rows(size_t rows);
  /// Reserves a ring entry in every KV head of a layer and remembers its address at index `first`;
  /// store() fills it. Threads may append at different indices.
  void append(LayerState& state, int layer, int16_t tag, size_t first);
  /// Stores tokens at the appended entries from `first` on; k and v are (rows, kv_heads, head_dim).
  void store(ConstTensorView k, ConstTensorView v, size_t first, Stream& stream);

 private:
  const CacheTraits& traits_;
  std::vector<std::byte*> keys_;  // addresses, (rows of a step, kv_heads)
  std::vector<std::byte*> values_;
};

}  // namespace kvlm
