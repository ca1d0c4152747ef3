#pragma once

#include <cstddef>
#include <memory>

#include "kvcache/kv_cache.h"
#include "kvcache/plan/cache_plan.h"
#include "kvcache/plan/sequence_bounds.h"

// From spec to cache. Each file needs only earlier ones: words, cache_spec, policy, registry,
// cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds, formula,
// [make_cache].

namespace kvlm {

class Arena;

/// Bytes that open(size) reserves in a cache of `plan`.
Reservation reservation(const CachePlan& plan, const SequenceSize& size);

/// Arena bytes that suffice for any `sequences` sequences of at most max_rows tokens each, whatever
/// share is prompt or visual. Each prompt must end before the next sequence is opened.
size_t session_bytes(const CachePlan& plan, int max_rows, int sequences = 1);

/// A cache with an arena of exactly `arena_bytes` on `device`. Throws Error{kOutOfMemory}.
std::unique_ptr<KvCache> make_cache(std::shared_ptr<const CachePlan> plan, size_t arena_bytes,
                                    Device device);
/// A cache whose sequences share an arena with those of other caches.
std::unique_ptr<KvCache> make_cache(std::shared_ptr<const CachePlan> plan,
                                    std::shared_ptr<Arena> arena);

}  // namespace kvlm
