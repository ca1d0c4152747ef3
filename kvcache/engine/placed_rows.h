#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "kernels/decode_table.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Tells a DecodeTable of KV heads whose packed rows it may drop (TableLane.placed).
class PlacedLanes {
 public:
  explicit PlacedLanes(const CacheTraits& traits);

  /// KV head number `index` of a layer: its runs and rows. What `lane` is given stays until the
  /// next one of that number.
  ///   memory  for its runs
  void describe(const HeadState& head, size_t index, RunList& memory, TableLane& lane);

 private:
  /// Of a KV head.
  struct Held {
    std::array<std::vector<int>, 2> came;            // of keys, of values
    std::array<std::vector<PackedBlock>, 2> blocks;  // of fixed runs, with all their rows
    std::vector<FixedBlock> fixed;
  };

  void number_rows(const HeadState& head, Held& held);

  const CacheTraits& traits_;
  std::vector<Held> held_;                         // (kv_heads,)
  std::array<std::vector<int>, kStores> numbers_;  // of slots of a store
};

/// Makes a KV head what the table has made of it, but for rows from number `known` on: of a step
/// that has not ended, whose row is the newest of both rings. Returns the weights of its slots, if
/// they are kept.
std::vector<float> take_placed(HeadState& head, PlacedRows& rows, int known);

}  // namespace kvlm
