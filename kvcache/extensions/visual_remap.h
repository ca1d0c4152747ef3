#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/attend_packed.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// The remap of the scores of packed visual slots (docs/formulas.md, "Remap"): over all of them,
/// or picture by picture.
class VisualRemap {
 public:
  explicit VisualRemap(const CacheTraits& traits);

  void reserve(const Workload& load);
  /// The remaps of KV head number `index` of a step. Different numbers may be used by several
  /// threads.
  ///   places  ranges of the places of packed rows, of which some may have gone, not of slots
  std::span<const ScoreRemap> describe(size_t index, const StorePlanes& visual, int layer,
                                       bool places);
  /// The same for whoever looks at a cache.
  std::vector<ScoreRemap> list(const StorePlanes& visual, int layer) const;

  /// Remaps of a KV head, at most.
  size_t ranges() const noexcept { return ranges_; }

 private:
  size_t fill(const StorePlanes& visual, int layer, bool places, ScoreRemap* remaps) const;

  const CacheTraits& traits_;
  size_t ranges_ = 0;               // of one KV head, at most
  std::vector<ScoreRemap> remaps_;  // (KV heads of a step, ranges_)
};

}  // namespace kvlm
