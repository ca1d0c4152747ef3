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

/// Describes the KV heads of a sequence for the DecodeTable. `told_anew` and `placed` choose the
/// form. Each thread has its own.
class HeadDescriber {
 public:
  ///   number  index of this describer among those in use, fewer than there are sequences
  HeadDescriber(const CacheTraits& traits, KeyBasisChange& key_basis, VisualRemap& remap,
                size_t number);

  /// (kv_heads,) of a layer, valid until the next call.
  std::span<const TableHead> describe(const Sequence& sequence, SequenceId id, int layer);

 private:
  void describe_head(const Sequence& sequence, SequenceId id, int layer, size_t h,
                     SegmentList& segments);
  void describe_weighed(const Sequence& sequence, int layer, size_t head,
                        TableHead& table_head) const;
  void describe_segments(const HeadState& head, int layer, size_t index, bool told_anew,
                         SegmentList& segments, TableHead& table_head);
  void add_packed(const HeadState& head, size_t store, KvSide side, int layer,
                  SegmentList& segments) const;

  const CacheTraits& traits_;
  KeyBasisChange& key_basis_;
  VisualRemap& remap_;
  size_t first_;  // first KV head number in remap_ for this describer
  PlacedHeads placed_;
  std::vector<TableHead> heads_;       // (kv_heads,)
  std::vector<SlotSegment> segments_;  // of heads_
};

}  // namespace kvlm
