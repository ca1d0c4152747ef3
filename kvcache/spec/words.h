#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// From spec to cache. Each file needs only earlier ones: [words], cache_spec, policy, registry,
// cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds, formula,
// make_cache.

namespace kvlm {

/// The words of `text` between separators, without surrounding blanks; at least one.
std::vector<std::string_view> split_words(std::string_view text, char separator);

/// The candidate nearest to `word` by edit distance, for "did you mean"; empty if none may be a
/// misspelling of it.
std::string_view nearest_spelling(std::string_view word,
                                  const std::vector<std::string_view>& candidates) noexcept;

/// Upper bound of layer numbers in a spec.
inline constexpr int kMaxSpecLayers = 1024;

/// Ranges first..last, both included, ascending and disjoint.
using LayerRanges = std::vector<std::pair<int, int>>;

/// Parses "0-1/30", in any order. Nothing if the text is malformed, or names a layer twice or one
/// beyond kMaxSpecLayers.
std::optional<LayerRanges> parse_layer_ranges(std::string_view text, char separator = '/');

/// Formats "0-1/30".
std::string layer_ranges_text(const LayerRanges& ranges);

bool contains(const LayerRanges& ranges, int layer) noexcept;

}  // namespace kvlm
