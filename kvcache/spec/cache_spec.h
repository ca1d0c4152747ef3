#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// From a sentence to a cache, each file needs only those before it: words, [cache_spec], policy,
// registry, cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds,
// formula, make_cache.

namespace kvlm {

/// Which slots of a layer a quantizer part serves.
enum class Scope : uint8_t { kAll, kVisual, kText };

/// One NAME,KEY=VALUE,... of a cache spec. Options are sorted by key, their values spelled
/// canonically. A sharing part is called "share" and has the option "what".
struct SpecPart {
  std::string name;
  std::vector<std::pair<std::string, std::string>> options;

  /// The value of an option that was written, or nothing.
  const std::string* find(std::string_view key) const noexcept;

  friend bool operator==(const SpecPart&, const SpecPart&) = default;
};

/// How keys and values are stored, shrunk, shared or dropped, as one sentence, which parse_spec()
/// (kvcache/spec/spec.h) reads:
///
///   SPEC  := PART ('+' PART)*
///   PART  := NAME (',' KEY=VALUE)*  |  WORD (' ' WORD)*  |  share=codes (',' KEY=VALUE)*
///   WORD  := visual=NAME (',' KEY=VALUE)*  |  text=NAME (',' KEY=VALUE)*
///
/// visual=NAME is short for NAME,scope=visual. Options are spelled out as written, but for a scope
/// or profile that is the policy's usual one. A quantizer part may carry layers=0-1/30; then it
/// serves these layers, and a part of the same scope without layers the others. Parts are in the
/// order of the pipeline: retention, quantizers, sharing.
struct CacheSpec {
  std::vector<SpecPart> parts;

  friend bool operator==(const CacheSpec&, const CacheSpec&) = default;
};

/// The canonical text: parse_spec(canonical(s)) == s.
std::string canonical(const CacheSpec& spec);
std::string part_text(const SpecPart& part);

}  // namespace kvlm
