#pragma once

#include <cstddef>
#include <vector>

#include "kernels/decode_table.h"
#include "kvcache/engine/sequence.h"

namespace kvlm {

/// Tells a DecodeTable of KV heads whose packed rows it may drop (TableShape::drops_packed).
class PlacedLanes {
 public:
  explicit PlacedLanes(size_t kv_heads) : keys_(kv_heads), values_(kv_heads) {}

  /// KV head number `index` of a layer. What `lane` is given stays until the next one of that
  /// number.
  void describe(const HeadState& head, size_t index, TableLane& lane);

 private:
  std::vector<std::vector<int>> keys_, values_;  // (kv_heads,) WeighedRows.came
};

/// Makes a KV head what the table has made of it, but for rows from number `known` on: of a step
/// that has not ended, whose row is the newest of both rings. Returns the weights of its slots, if
/// they are kept.
std::vector<float> take_placed(HeadState& head, PlacedRows& rows, int known);

}  // namespace kvlm
