#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/retention.h"

namespace kvlm {

/// What a row of decode has come to.
struct Gain {
  size_t bytes = 0;           ///< that the sequence has more, modulo 2^64: it may be fewer
  std::array<bool, 2> due{};  ///< by KvSide: a window is full that the GPU packs
  bool host = false;          ///< the host has a window to flush, or a slot to drop
};

/// Counts, on the host, what sequences gain that a DecodeTable counts.
class GainedCounts {
 public:
  explicit GainedCounts(const CacheTraits& traits) : traits_(traits) {}

  /// Begins with a sequence as its planes are.
  void start(Sequence& sequence) const;
  /// Counts a row.
  ///   dropped  (Sequence.dropping,) returned: DecodeTable::evict(); kNoSlot also where the host
  ///            drops
  Gain gain(Sequence& sequence, std::span<int> dropped) const;
  /// Makes planes and tags count the rows that they do not count yet.
  void catch_up(Sequence& sequence) const;
  /// The same of a sequence that is told_anew: the host has yet to pack and to drop.
  void count_rows(Sequence& sequence) const;
  /// Counts the windows that are full, as RowAppender does, after catch_up().
  void count_due(Sequence& sequence) const;
  /// Counts the row that a step has stored and attended to, in a copy of a KV head.
  void count_newest(HeadState& head) const;

 private:
  /// The slots that a layer has dropped after each of its last rows, kNoSlot where none: a list for
  /// every KV head, or one for all.
  struct Dropped {
    std::vector<std::vector<int>> lists;
    std::span<const int> of(size_t head) const { return lists[lists.size() == 1 ? 0 : head]; }
  };

  void group_layers(Sequence& sequence) const;
  DroppingLayers dropping_of(const LayerState& state, int layer) const;
  int behind_pictures(const HeadState& head) const;
  GainedRows rows_of(const Plane& plane, KvSide side, int layer) const;
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
  static void replay(Plane& plane, int gained, std::span<const int> dropped, int before,
                     const FlushRule* window);
  static void replay_tags(HeadState& head, int gained, std::span<const int> dropped);

  const CacheTraits& traits_;
};

}  // namespace kvlm
