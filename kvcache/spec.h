#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcache/words.h"

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

/// How keys and values are stored, shrunk, shared or dropped, as one sentence (design.md 3):
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

/// Parses the text, checks every name and value against the registry, and refuses combinations
/// that no decoder can have (specs 10); what depends on the decoder's shape, unsupported() checks.
/// Blanks around '+', ',' and '=' are allowed. Throws Error{kInvalidArgument} that shows the
/// offending word and the nearest legal spelling.
CacheSpec parse_spec(std::string_view text);

/// The canonical text: parse_spec(canonical(s)) == s.
std::string canonical(const CacheSpec& spec);
std::string part_text(const SpecPart& part);

/// A spec that differs by layer, from its pieces as a spec file has them: what every layer has, and
/// for sets of layers ("0-1,30") the quantizers that these have instead. The same rules and errors
/// as parse_spec(); a message of a piece starts with what the piece is called.
CacheSpec layered_spec(std::string_view every_layer,
                       const std::vector<std::pair<std::string, std::string>>& layers);

}  // namespace kvlm
