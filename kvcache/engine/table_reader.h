#pragma once

#include <span>
#include <vector>

#include "kernels/decode_table.h"
#include "kvcache/engine/gained_counts.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/store.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Counts on the host what has become of sequences that a GPU decodes: from numbers alone
/// (GainedCounts), or from what the table says of rows that it has dropped.
class TableReader {
 public:
  /// `table`, null without a GPU, must stay.
  TableReader(const CacheTraits& traits, SequenceStore& store, const GainedCounts& counts,
              const DecodeTable* table)
      : traits_(traits), store_(store), counts_(counts), table_(table) {}

  int slot_of(const Sequence& sequence) const noexcept {
    return static_cast<int>(&sequence - store_.all().data());
  }
  /// GpuDecode::catch_up().
  void catch_up(Sequence& sequence) const;
  /// The same of sequences whose windows may be full, which are the host's then.
  void take_back(std::span<Sequence* const> sequences, Stream& stream);
  /// Heads of a layer as they are now, also in a step, of a sequence that drops_on_gpu().
  ///   newest  with the row of the step that is under way
  std::vector<HeadState> heads_now(const Sequence& sequence, int layer, bool newest) const;
  /// (layers,) of such a sequence the slots of its first KV head that are stored apart; empty: none
  /// are, or the host knows.
  std::vector<int> visual_slots(const Sequence& sequence) const;

 private:
  void count_rows(Sequence& sequence) const;
  void read_placed(const Sequence& sequence, PlacedCopy& to) const;
  void take_placed(Sequence& sequence, PlacedCopy& copy) const;
  void end_placed(Sequence& sequence, const PlacedCopy& copy) const;

  const CacheTraits& traits_;
  SequenceStore& store_;
  const GainedCounts& counts_;
  const DecodeTable* table_;
  std::vector<PlacedCopy> copies_;
};

}  // namespace kvlm
