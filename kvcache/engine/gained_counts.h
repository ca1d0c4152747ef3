#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/retention.h"

namespace kvlm {

/// Result of counting one decode token of a sequence.
struct Gain {
  size_t bytes = 0;           ///< growth of the sequence modulo 2^64, since it may shrink
  std::array<bool, 2> due{};  ///< by KvSide: the GPU has a full window to pack
  bool host = false;          ///< the host has a window to flush or a slot to evict
};

/// Host-side counters of sequences that a DecodeTable counts.
class GainedCounts {
 public:
  explicit GainedCounts(const CacheTraits& traits) : traits_(traits) {}

  /// Initialises the counters from the sequence's K and V buffers.
  void start(Sequence& sequence) const;
  /// Counts one token.
  ///   dropped  (Sequence.dropping,) output: slots for DecodeTable::evict(); kNoSlot also if the
  ///            host evicts
  Gain gain(Sequence& sequence, std::span<int> dropped) const;
  /// Updates buffers and tags by the uncounted tokens.
  void catch_up(Sequence& sequence) const;
  /// The same if told_anew: the host has yet to pack and evict.
  void count_rows(Sequence& sequence) const;
  /// Counts full windows, as RowAppender does, after catch_up().
  void count_due(Sequence& sequence) const;
  /// Counts the token just stored and attended to, in a copy of a KV head.
  void count_newest(HeadState& head) const;

 private:
  /// Slots that a layer evicted after each of its newest tokens, kNoSlot for none: one list per KV
  /// head, or one for all.
  struct Dropped {
    std::vector<std::vector<int>> lists;
    std::span<const int> of(size_t head) const { return lists[lists.size() == 1 ? 0 : head]; }
  };

  void group_layers(Sequence& sequence) const;
  DroppingLayers dropping_of(const LayerState& state, int layer) const;
  int behind_images(const HeadState& head) const;
  GainedRows rows_of(const KvBuffer& buffer, KvSide side, int layer) const;
  static void add(Sequence& sequence, const GainedRows& rows);
  static Gain gain_row(Sequence& sequence);
  static void drop_weighed(Sequence& sequence, Gain& gain);
  void name_dropped(Sequence& sequence, std::span<int> dropped) const;
  void choose_dropped(const Sequence& sequence, std::span<int> dropped) const;
  bool gpu_may_drop(const Sequence& sequence, std::span<const int> dropped) const noexcept;
  static DecodeView view_of(const Sequence& sequence, const DroppingLayers& layers) noexcept;
  void forget_slots(Sequence& sequence, std::span<const int> dropped) const;
  size_t drop_rows(Sequence& sequence, std::span<const int> dropped) const;
  void forget_scores(Sequence& sequence, std::span<const int> dropped) const;
  Dropped replay_choices(Sequence& sequence, int layer) const;
  const FlushRule* window_of(KvSide side, int layer) const noexcept;
  static void replay(KvBuffer& buffer, int gained, std::span<const int> dropped, int before,
                     const FlushRule* window);
  static void replay_tags(HeadState& head, int gained, std::span<const int> dropped);

  const CacheTraits& traits_;
};

}  // namespace kvlm
