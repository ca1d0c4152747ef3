#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcache/spec/cache_spec.h"

// From spec to cache. Each file needs only earlier ones: words, cache_spec, policy, registry,
// cache_plan, conflicts, planner, [spec]; and of the plan: layouts, sequence_bounds, formula,
// make_cache.

namespace kvlm {

/// Parses the text, checks every name and value against the registry, and refuses combinations that
/// no decoder can have. plan_cache() checks what depends on the decoder's shape. Blanks around '+',
/// ',' and '=' are allowed. Throws Error{kInvalidArgument} with the offending word and the nearest
/// legal spelling.
CacheSpec parse_spec(std::string_view text);

/// A spec that differs by layer, as a spec file has it: the parts for all layers, and for sets of
/// layers ("0-1,30") their own quantizers. Rules and errors are those of parse_spec(); messages
/// start with the name of the entry.
CacheSpec layered_spec(std::string_view every_layer,
                       const std::vector<std::pair<std::string, std::string>>& layers);

}  // namespace kvlm
