#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcache/kv_cache.h"
#include "kvcache/plan/layouts.h"

// From spec to cache. Each file needs only earlier ones: words, cache_spec, policy, registry,
// cache_plan, conflicts, planner, spec; and of the plan: layouts, [sequence_bounds], formula,
// make_cache.
namespace kvlm {

/// Bytes that open(size) reserves in an arena.
struct Reservation {
  size_t kept = 0;     ///< bytes until close()
  size_t staging = 0;  ///< bytes more until the first prompt has ended

  size_t bytes() const noexcept { return kept + staging; }
};

/// Arena bytes of sequences under a plan, which must outlive this.
class SequenceBounds {
 public:
  explicit SequenceBounds(const CachePlan& plan)
      : layouts_(plan), plan_(&plan), shape_(&plan.shape) {}

  /// Arena bytes of a sequence of `size` in a PolicyCache.
  Reservation reservation(const SequenceSize& size) const noexcept;
  /// Arena bytes of any `sequences` sequences of at most max_rows tokens each, if one first prompt
  /// at a time is staged.
  size_t session_bytes(int max_rows, int sequences = 1) const noexcept;
  /// Upper bound of a sequence's bytes after its prompt, for any selection.
  size_t memory_bound(const SequenceSize& size) const noexcept;
  /// Bytes of staged tokens during the first prompt.
  size_t staging_bytes(const SequenceSize& size) const noexcept;

 private:
  size_t layer_bound(int layer, int64_t text, int64_t visual, int64_t future) const noexcept;
  size_t block_bound() const noexcept;

  Layouts layouts_;
  const CachePlan* plan_;
  const CacheShape* shape_;
};

}  // namespace kvlm
