#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/decode_table.h"
#include "kvcache/engine/placed_rows.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/key_basis.h"
#include "kvcache/extensions/visual_remap.h"

namespace kvlm {

/// Says what a DecodeTable is to keep of the KV heads of a sequence, whose `told_anew` and `placed`
/// say in which way. Threads may each have one.
class LaneDescriber {
 public:
  ///   number  of this one among those that work at the same time, fewer than there are sequences
  LaneDescriber(const CacheTraits& traits, KeyBasisChange& key_basis, VisualRemap& remap,
                size_t number);

  /// (kv_heads,) of a layer. They stay until the next call.
  std::span<const TableLane> describe(const Sequence& sequence, SequenceId id, int layer);

 private:
  void describe_lane(const Sequence& sequence, SequenceId id, int layer, size_t h, RunList& runs);
  void describe_weighed(const Sequence& sequence, int layer, size_t head, TableLane& lane) const;
  void describe_runs(const HeadState& head, int layer, size_t index, bool told_anew, RunList& runs,
                     TableLane& lane);
  void add_packed(const HeadState& head, size_t store, KvSide side, int layer, RunList& runs) const;

  const CacheTraits& traits_;
  KeyBasisChange& key_basis_;
  VisualRemap& remap_;
  size_t first_;  // of the numbers of KV heads that remap_ knows
  PlacedLanes placed_;
  std::vector<TableLane> lanes_;  // (kv_heads,)
  std::vector<SlotRun> runs_;     // of these
};

}  // namespace kvlm
