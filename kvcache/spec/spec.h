#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcache/spec/cache_spec.h"

// From a sentence to a cache, each file needs only those before it: words, cache_spec, policy,
// registry, cache_plan, conflicts, planner, [spec]; and of the plan: layouts, sequence_bounds,
// formula, make_cache.

namespace kvlm {

/// Parses the text, checks every name and value against the registry, and refuses combinations
/// that no decoder can have; what depends on the decoder's shape, plan_cache() checks.
/// Blanks around '+', ',' and '=' are allowed. Throws Error{kInvalidArgument} that shows the
/// offending word and the nearest legal spelling.
CacheSpec parse_spec(std::string_view text);

/// A spec that differs by layer, from its pieces as a spec file has them: what every layer has, and
/// for sets of layers ("0-1,30") the quantizers that these have instead. The same rules and errors
/// as parse_spec(); a message of a piece starts with what the piece is called.
CacheSpec layered_spec(std::string_view every_layer,
                       const std::vector<std::pair<std::string, std::string>>& layers);

}  // namespace kvlm
