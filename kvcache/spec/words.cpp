#include "kvcache/spec/words.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>

namespace kvlm {

namespace {

// Characters compared; the rest of an overlong word is ignored.
constexpr size_t kMaxWord = 64;

/// Insertions, deletions, substitutions, and swaps of neighbours.
size_t edit_distance(std::string_view a, std::string_view b) noexcept {
  a = a.substr(0, kMaxWord);
  b = b.substr(0, kMaxWord);
  std::array<std::array<size_t, kMaxWord + 1>, 3> rows{};  // of letter i, i - 1 and i - 2 of a
  std::iota(rows[0].begin(), rows[0].end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    std::rotate(rows.begin(), rows.end() - 1, rows.end());
    auto& [row, above, before] = rows;
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, substituted});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return rows[0][b.size()];
}

/// A word may be a misspelling: at most a third of the letters differ, or one word is a prefix of
/// the other and the candidate has at least half of its letters.
bool is_near(std::string_view word, std::string_view candidate, size_t distance) noexcept {
  constexpr size_t kLeast = 3;
  if (word.size() >= kLeast && candidate.starts_with(word)) return true;
  if (candidate.size() >= kLeast && word.starts_with(candidate)) {
    return 2 * candidate.size() >= word.size();
  }
  return 3 * distance <= std::max(word.size(), candidate.size());
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::optional<int> layer_number(std::string_view text) {
  int layer = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), layer);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (layer < 0 || layer >= kMaxSpecLayers) return std::nullopt;
  return layer;
}

}  // namespace

std::vector<std::string_view> split_words(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  for (size_t begin = 0;;) {
    const size_t end = text.find(separator, begin);
    pieces.push_back(trimmed(text.substr(begin, end - begin)));
    if (end == std::string_view::npos) return pieces;
    begin = end + 1;
  }
}

std::string_view nearest_spelling(std::string_view word,
                                  const std::vector<std::string_view>& candidates) noexcept {
  word = word.substr(0, kMaxWord);
  std::string_view best;
  size_t best_distance = std::string_view::npos;
  for (const std::string_view candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance && (distance == 0 || is_near(word, candidate, distance))) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::optional<LayerRanges> parse_layer_ranges(std::string_view text, char separator) {
  LayerRanges ranges;
  for (const std::string_view word : split_words(text, separator)) {
    const size_t dash = word.find('-');
    const std::optional<int> first = layer_number(word.substr(0, dash));
    const std::optional<int> last =
        dash == std::string_view::npos ? first : layer_number(word.substr(dash + 1));
    if (!first || !last || *last < *first) return std::nullopt;
    ranges.emplace_back(*first, *last);
  }
  std::sort(ranges.begin(), ranges.end());
  LayerRanges joined;
  for (const auto& [first, last] : ranges) {
    if (!joined.empty() && first <= joined.back().second) return std::nullopt;
    if (!joined.empty() && first == joined.back().second + 1) {
      joined.back().second = last;
    } else {
      joined.emplace_back(first, last);
    }
  }
  return joined;
}

std::string layer_ranges_text(const LayerRanges& ranges) {
  std::string text;
  for (const auto& [first, last] : ranges) {
    if (!text.empty()) text += '/';
    text += first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last);
  }
  return text;
}

bool contains(const LayerRanges& ranges, int layer) noexcept {
  return std::any_of(ranges.begin(), ranges.end(), [&](const std::pair<int, int>& range) {
    return range.first <= layer && layer <= range.second;
  });
}

}  // namespace kvlm
