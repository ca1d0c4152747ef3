#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// From spec to cache. Each file needs only earlier ones: words, [cache_spec], policy, registry,
// cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds, formula,
// make_cache.

namespace kvlm {

/// Which tokens of a layer a quantizer packs.
enum class Scope : uint8_t { kAll, kVisual, kText };

/// One NAME,KEY=VALUE,... of a cache spec. Options are sorted by key, with canonical values. A
/// sharing part has the name "share" and the option "what".
struct SpecPart {
  std::string name;
  std::vector<std::pair<std::string, std::string>> options;

  /// The value of an option if it was written.
  const std::string* find(std::string_view key) const noexcept;

  friend bool operator==(const SpecPart&, const SpecPart&) = default;
};

/// How keys and values are stored, packed, shared or evicted, as one text for parse_spec()
/// (kvcache/spec/spec.h):
///
///   SPEC  := PART ('+' PART)*
///   PART  := NAME (',' KEY=VALUE)*  |  WORD (' ' WORD)*  |  share=codes (',' KEY=VALUE)*
///   WORD  := visual=NAME (',' KEY=VALUE)*  |  text=NAME (',' KEY=VALUE)*
///
/// visual=NAME is short for NAME,scope=visual. Options are kept as written, except a scope or
/// profile that is the policy's default. A quantizer part may have layers=0-1/30: then it packs
/// these layers, and a part of the same scope without layers= the others. Parts are in pipeline
/// order: retention, quantizers, sharing.
struct CacheSpec {
  std::vector<SpecPart> parts;

  friend bool operator==(const CacheSpec&, const CacheSpec&) = default;
};

/// The canonical text: parse_spec(canonical(s)) == s.
std::string canonical(const CacheSpec& spec);
std::string part_text(const SpecPart& part);

}  // namespace kvlm
