#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// From a sentence to a cache, each file needs only those before it: [words], cache_spec, policy,
// registry, cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds,
// formula, make_cache.

namespace kvlm {

/// The pieces of `text` between separators, without the blanks around them; never none.
std::vector<std::string_view> split_words(std::string_view text, char separator);

/// The candidate with the smallest edit distance to `word`, for "did you mean"; empty if none is
/// near enough to be a misspelling of it.
std::string_view nearest_spelling(std::string_view word,
                                  const std::vector<std::string_view>& candidates) noexcept;

/// Layers that a spec can name.
inline constexpr int kMaxSpecLayers = 1024;

/// Ranges first..last, both included, ascending and apart.
using LayerRanges = std::vector<std::pair<int, int>>;

/// "0-1/30", in any order, as ranges. Nothing if the text is not that, or names a layer twice or
/// one beyond kMaxSpecLayers.
std::optional<LayerRanges> parse_layer_ranges(std::string_view text, char separator = '/');

/// "0-1/30".
std::string layer_ranges_text(const LayerRanges& ranges);

bool contains(const LayerRanges& ranges, int layer) noexcept;

}  // namespace kvlm
