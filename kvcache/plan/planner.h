#pragma once

#include <memory>
#include <optional>

#include "kvcache/plan/cache_plan.h"
#include "kvcache/plan/conflicts.h"
#include "kvcache/spec/policy.h"

// From a sentence to a cache, each file needs only those before it: words, cache_spec, policy,
// registry, cache_plan, conflicts, [planner], spec; and of the plan: layouts, sequence_bounds,
// formula, make_cache.

namespace kvlm {

/// What `spec`, which parse_spec() returned, means for a decoder of `shape`. `profile`, what
/// `vlm-kv profile` measured, may be null. Needs no weights: made when a model is opened, then
/// handed on; caches share it. Throws Error with the reason and the cure: kUnsupported for what
/// cannot work together or does not fit the shape.
std::shared_ptr<CachePlan> plan_cache(const CacheSpec& spec, const CacheShape& shape,
                                      const PolicyProfile* profile = nullptr);

/// Why no decoder can have `spec`; nothing if one may. For parse_spec(), which knows no decoder.
/// Throws Error{kInvalidArgument} for an option that does nothing.
std::optional<Conflict> conflict_without_decoder(const CacheSpec& spec);

}  // namespace kvlm
