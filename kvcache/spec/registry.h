#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/base/dtype.h"
#include "kvcache/spec/policy.h"

// From a sentence to a cache, each file needs only those before it: words, cache_spec, policy,
// [registry], cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds,
// formula, make_cache.

namespace kvlm {

/// Every part that a spec may have, in the order of `vlm-kv list`: plain formats, quantizers,
/// retention rules that are built in and those that were registered, sharing.
std::vector<const PolicyInfo*> policies();

/// Every name that a spec part may have.
std::vector<std::string_view> part_names();

/// The policy of a name, or null.
const PolicyInfo* find_policy(std::string_view name) noexcept;
const QuantizerEntry* find_quantizer(std::string_view name) noexcept;
const RetentionEntry* find_retention(std::string_view name) noexcept;
/// The element type of a plain format, or nothing if `name` is not one.
std::optional<DType> find_format(std::string_view name) noexcept;

/// Adds a retention rule that is not built in. From then on specs may name it, and parsing, lists,
/// conflicts and sizes treat it as they treat the built-in ones.
///
///   rule.info   the name is a word [a-z][a-z0-9_]*. `options` is the table of the options that the
///               rule has, in which keep, if it is there, is a fraction (kReal); every rule also
///               has profile. All text is copied. `kind` need not be set. Empty sentences get a
///               standard text.
///   rule.make   called whenever a spec with the rule is parsed or planned: parsing makes a rule
///               for a decoder of its own choice, to find conflicts, so that it must be cheap.
///
/// Call it before the first spec that names the rule is parsed, for example first in main(). Any
/// thread may, also while others parse. An entry stays until the process ends and is never
/// destroyed, so that `make` may hold objects of an interpreter. `make` and the rules it makes are
/// called by whichever thread parses, plans or prefills; select() by several threads at once.
///
/// The slots that the rule selects are checked: a selection that breaks the contract of
/// Retention::select() fails that prompt with Error{kInvalidArgument}.
///
/// Throws Error{kInvalidArgument} for a name that is taken or no word, an option that no spec could
/// write or whose values are not legal, and a rule without make().
void register_retention(RetentionEntry rule);

}  // namespace kvlm
