#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvlm {

/// One NAME,KEY=VALUE,... of a cache spec. Options are sorted by key.
struct SpecPart {
  std::string name;
  std::vector<std::pair<std::string, std::string>> options;

  friend bool operator==(const SpecPart&, const SpecPart&) = default;
};

/// How keys and values are stored, shrunk, shared or dropped, as one sentence (design.md 3):
///   SPEC := PART ('+' PART)*     PART := NAME (',' KEY=VALUE)*
struct CacheSpec {
  std::vector<SpecPart> parts;

  friend bool operator==(const CacheSpec&, const CacheSpec&) = default;
};

/// Parses the text and checks every name and value against the registry; spaces around '+', ',' and
/// '=' are allowed. Throws Error{kInvalidArgument} that shows the offending word and the nearest
/// legal spelling.
CacheSpec parse_spec(std::string_view text);

/// The canonical text: parse_spec(canonical(s)) == s.
std::string canonical(const CacheSpec& spec);

/// The candidate with the smallest edit distance to `word`, for "did you mean".
std::string_view nearest_spelling(std::string_view word,
                                  const std::vector<std::string_view>& candidates) noexcept;

}  // namespace kvlm
