#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "kernels/decode_table.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Describes KV heads with in-place eviction (TableHead.placed) to a DecodeTable. A place is memory
/// for one token, in a block or in a ring, occupied or empty.
class PlacedHeads {
 public:
  explicit PlacedHeads(const CacheTraits& traits);

  /// Fills in `head` for KV head number `index` of a layer. What it points to stays valid until the
  /// next call with that number.
  ///   queries  by store, in the basis of its packed keys; null: unchanged queries
  ///   memory   for its segments
  void describe(const HeadState& head, int layer, size_t index,
                const std::array<const float*, kStores>& queries, SegmentList& memory,
                TableHead& table_head);

 private:
  /// Arrays that the description of one KV head points to.
  struct Held {
    // By KvSide; blocks also by store.
    std::array<std::vector<int>, 2> came;
    std::array<std::array<std::vector<PackedBlock>, kStores>, 2> blocks;  // evicted tokens included
    std::array<std::vector<FixedBlock>, 2> fixed;
  };

  static SlotSegment* add_places(const KvBuffer& buffer, size_t side, size_t store, Held& held,
                                 SegmentList& segments);
  void number_rows(const HeadState& head, int layer, Held& held);

  const CacheTraits& traits_;
  std::vector<Held> held_;                         // (kv_heads,)
  std::array<std::vector<int>, kStores> numbers_;  // arrival numbers of a store's slots
};

/// Updates a KV head from the table's copy of it, except for tokens numbered `known` or later.
/// Those are of a step that has not ended, whose token is the newest of both rings. Returns the
/// weights of its slots, if the table keeps any.
///   of  LayerTraits of its layer
std::vector<float> take_placed(const LayerTraits& of, HeadState& head, PlacedRows& rows, int known);

}  // namespace kvlm
