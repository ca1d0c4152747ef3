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
  ///   queries  by store, in the basis of its packed keys; null: the lane's own
  ///   memory   for its runs
  void describe(const HeadState& head, int layer, size_t index,
                const std::array<const float*, kStores>& queries, RunList& memory, TableLane& lane);

 private:
  /// Of a KV head.
  struct Held {
    // Of keys, of values; blocks by store.
    std::array<std::vector<int>, 2> came;
    std::array<std::array<std::vector<PackedBlock>, kStores>, 2> blocks;  // with all their rows
    std::array<std::vector<FixedBlock>, 2> fixed;
  };

  static SlotRun* add_places(const Plane& plane, size_t side, size_t store, Held& held,
                             RunList& runs);
  void number_rows(const HeadState& head, int layer, Held& held);

  const CacheTraits& traits_;
  std::vector<Held> held_;                         // (kv_heads,)
  std::array<std::vector<int>, kStores> numbers_;  // of slots of a store
};

/// Makes a KV head what the table has made of it, but for rows from number `known` on: of a step
/// that has not ended, whose row is the newest of both rings. Returns the weights of its slots, if
/// they are kept.
///   of  LayerTraits of its layer
std::vector<float> take_placed(const LayerTraits& of, HeadState& head, PlacedRows& rows, int known);

}  // namespace kvlm
