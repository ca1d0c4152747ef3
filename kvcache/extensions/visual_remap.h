#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/attend_packed.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// CalibQuant's remap of the scores of packed visual slots (docs/formulas.md, "Remap"): over all of
/// them, or per image.
class VisualRemap {
 public:
  explicit VisualRemap(const CacheTraits& traits);

  void reserve(const Workload& load);
  /// The remaps of KV head number `index` of a step. Threads may use different indices.
  ///   places  ranges count places, evicted tokens included, instead of slots
  std::span<const ScoreRemap> describe(size_t index, const StoreBuffers& visual, int layer,
                                       bool places);
  /// The same, as a copy for tests and tools.
  std::vector<ScoreRemap> list(const StoreBuffers& visual, int layer) const;

  /// The most remaps of a KV head.
  size_t ranges() const noexcept { return ranges_; }

 private:
  size_t fill(const StoreBuffers& visual, int layer, bool places, ScoreRemap* remaps) const;

  const CacheTraits& traits_;
  size_t ranges_ = 0;               // the most remaps of a KV head
  std::vector<ScoreRemap> remaps_;  // (KV heads of a step, ranges_)
};

}  // namespace kvlm
