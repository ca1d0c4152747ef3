#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/plan/cache_plan.h"

// From a sentence to a cache, each file needs only those before it: words, cache_spec, policy,
// registry, cache_plan, [conflicts], planner, spec; and of the plan: layouts, sequence_bounds,
// formula, make_cache.

namespace kvlm {

/// Why parts of a spec cannot work together.
struct Conflict {
  std::string_view row;  ///< the sentence of the table's row, with {0} where names go
  std::string text;      ///< what is said, with the cure
};

/// What can be told from a spec and the names in `plan`, before it has objects.
std::optional<Conflict> conflict_of_words(const CacheSpec& spec, const CachePlan& plan);

/// What is told by the objects of `plan`, whose words are sound.
std::optional<Conflict> conflict_of_objects(const CachePlan& plan);

/// The rows of the tables, in the order in which they are asked.
std::vector<std::string_view> conflict_rows();

}  // namespace kvlm
