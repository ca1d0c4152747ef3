#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/base/dtype.h"
#include "kvcache/spec/policy.h"

// From spec to cache. Each file needs only earlier ones: words, cache_spec, policy, [registry],
// cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds, formula,
// make_cache.

namespace kvlm {

/// All parts that a spec may have, in the order of `vlm-kv list`: plain formats, quantizers,
/// built-in retention rules, registered ones, simulated quantizers, sharing.
std::vector<const PolicyInfo*> policies();

/// All names that a spec part may have, short.
std::vector<std::string_view> part_names();

/// The policy of a name, whole ("python:vnorm") or short ("vnorm"), or null. Canonical specs have
/// the whole one.
const PolicyInfo* find_policy(std::string_view name) noexcept;
const QuantizerEntry* find_quantizer(std::string_view name) noexcept;
const RetentionEntry* find_retention(std::string_view name) noexcept;
const SimulationEntry* find_simulation(std::string_view name) noexcept;
/// The element type of a plain format; nothing if `name` is not one.
std::optional<DType> find_format(std::string_view name) noexcept;

/// Registers a retention rule. From then on specs may name it. Parsing, lists, conflicts and sizes
/// treat it as a built-in rule.
///
///   rule.info   the name matches [a-z][a-z0-9_]*, after its origin and a colon if it has one, and
///               its last word is taken by no other policy. `options` is the table of the rule's
///               options. If it has keep, that is a fraction (kReal). Every rule also has profile.
///               All text is copied. `kind` is ignored. Empty sentences get a standard text.
///   rule.make   called for each spec with the rule that is parsed or planned. Parsing makes a rule
///               for an assumed decoder to find conflicts, so make() must be cheap.
///
/// Call it before the first spec with the rule is parsed, for example at the start of main(). Any
/// thread may call it, also while others parse. An entry is never destroyed, so `make` may hold
/// objects of an interpreter. `make` and its rules are called by any thread that parses, plans or
/// prefills; select() by several threads at once.
///
/// The rule's selections are checked: one that violates the contract of Retention::select() fails
/// its prompt with Error{kInvalidArgument}.
///
/// Throws Error{kInvalidArgument} for a name that is taken or illegal, an option that no spec could
/// write or with illegal values, and a rule without make().
void register_retention(RetentionEntry rule);
/// Registers a simulated quantizer; the same holds for it as for a rule.
void register_simulation(SimulationEntry simulation);

}  // namespace kvlm
