#pragma once

#include <memory>
#include <optional>

#include "kvcache/plan/cache_plan.h"
#include "kvcache/plan/conflicts.h"
#include "kvcache/spec/policy.h"

// From spec to cache. Each file needs only earlier ones: words, cache_spec, policy, registry,
// cache_plan, conflicts, [planner], spec; and of the plan: layouts, sequence_bounds, formula,
// make_cache.

namespace kvlm {

/// The plan of `spec` (from parse_spec()) for a decoder of `shape`. `profile` has the values
/// measured by `vlm-kv profile`, or is null. Needs no weights: made when a model is opened, then
/// shared by its caches. Throws Error{kUnsupported} with reason and cure for conflicts and for a
/// shape that does not fit.
std::shared_ptr<CachePlan> plan_cache(const CacheSpec& spec, const CacheShape& shape,
                                      const PolicyProfile* profile = nullptr);

/// A conflict of `spec` with every decoder, or none. For parse_spec(), which has no decoder. Throws
/// Error{kInvalidArgument} for an option without effect.
std::optional<Conflict> conflict_without_decoder(const CacheSpec& spec);

}  // namespace kvlm
