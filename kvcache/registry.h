#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/base/dtype.h"
#include "kvcache/policy.h"

// From a sentence to a cache, each file needs only those before it: words, cache_spec, policy,
// [registry], cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds,
// formula, make_cache.

namespace kvlm {

/// Every part that a spec may have, in the order of `vlm-kv list`: plain formats, quantizers,
/// retention rules, sharing.
std::vector<const PolicyInfo*> policies();

/// Every name that a spec part may have.
std::vector<std::string_view> part_names();

/// The policy of a name, or null.
const PolicyInfo* find_policy(std::string_view name) noexcept;
const QuantizerEntry* find_quantizer(std::string_view name) noexcept;
const RetentionEntry* find_retention(std::string_view name) noexcept;
/// The element type of a plain format, or nothing if `name` is not one.
std::optional<DType> find_format(std::string_view name) noexcept;

}  // namespace kvlm
