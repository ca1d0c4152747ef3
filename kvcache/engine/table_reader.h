#pragma once

#include <span>
#include <vector>

#include "kernels/decode_table.h"
#include "kvcache/engine/gained_counts.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/store.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Updates the host's state of sequences that a GPU decodes: from token counts (GainedCounts), or,
/// after eviction on the GPU, from a copy of the table.
class TableReader {
 public:
  /// `table` is null without a GPU and must outlive this.
  TableReader(const CacheTraits& traits, SequenceStore& store, const GainedCounts& counts,
              const DecodeTable* table)
      : traits_(traits), store_(store), counts_(counts), table_(table) {}

  int slot_of(const Sequence& sequence) const noexcept {
    return static_cast<int>(&sequence - store_.all().data());
  }
  /// GpuDecode::catch_up().
  void catch_up(Sequence& sequence) const;
  /// The same for sequences with windows that the host may have to flush; they leave the table.
  void take_back(std::span<Sequence* const> sequences, Stream& stream);
  /// Current KV heads of a layer, also during a step, if drops_on_gpu().
  ///   newest  includes the token of the current step
  std::vector<HeadState> heads_now(const Sequence& sequence, int layer, bool newest) const;
  /// (layers,) slots of its first KV head in kVisual, if drops_on_gpu(). Empty if no tokens are
  /// stored separately, or the host's count is current.
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
