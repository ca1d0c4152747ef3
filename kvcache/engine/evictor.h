#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/row_moves.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/decode_weights.h"
#include "kvcache/extensions/sink_rotation.h"

namespace kvlm {

/// Evicts the slots that the retention rule names, after attention (docs/formulas.md, "Eviction").
class Evictor {
 public:
  Evictor(const CacheTraits& traits, DecodeWeights& weights, SinkRotation& sinks);

  void reserve(const Workload& load);
  /// Evicts in every layer, after a generated token has attended.
  void evict(std::span<Sequence* const> sequences, Stream& stream);
  /// Evicts in one layer, after token number `newer` of a later prompt was stored.
  void evict_layer(Sequence& sequence, int layer, int newer, Stream& stream);
  /// Clears the list of gaps after a failed step.
  void clear() noexcept { gaps_.clear(); }

 private:
  /// Gaps are closed once there are so many; a sequence adds all of its gaps before the check.
  static constexpr size_t kGapsTogether = 4096;

  void evict_from(Sequence& sequence, int layer, int step, Stream& stream);
  int choose(LayerState& state, int layer, size_t head, DecodeView& view, Stream& stream);
  int evict_slot(LayerState& state, HeadState& head, int slot);
  void evict_weight(HeadState& head, size_t store, int at);
  int slot_in_store(const HeadState& head, size_t store, int slot) const noexcept;
  void close_gaps_left(Stream& stream);

  const CacheTraits& traits_;
  DecodeWeights& weights_;
  SinkRotation& sinks_;
  std::vector<RowGap> gaps_;
  std::vector<int> dropped_;  // (layers,) slots evicted in this step, by first layer of a pair
};

}  // namespace kvlm
