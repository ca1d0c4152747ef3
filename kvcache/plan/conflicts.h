#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/plan/cache_plan.h"

// From spec to cache. Each file needs only earlier ones: words, cache_spec, policy, registry,
// cache_plan, [conflicts], planner, spec; and of the plan: layouts, sequence_bounds, formula,
// make_cache.

namespace kvlm {

/// Reason why parts of a spec cannot be combined.
struct Conflict {
  std::string_view row;  ///< message template of the table row, with {0} for names
  std::string text;      ///< the message, with the cure
};

/// Conflicts that follow from a spec and the names in `plan`, before policy objects exist.
std::optional<Conflict> conflict_of_words(const CacheSpec& spec, const CachePlan& plan);

/// Conflicts that follow from the objects of `plan`, which has passed conflict_of_words().
std::optional<Conflict> conflict_of_objects(const CachePlan& plan);

/// The table rows, in the order of their checks.
std::vector<std::string_view> conflict_rows();

}  // namespace kvlm
