#include "kvcache/spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "kernels/base/error.h"
#include "kvcache/registry.h"

namespace kvlm {

namespace {

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  for (size_t begin = 0;;) {
    const size_t end = text.find(separator, begin);
    pieces.push_back(trim(text.substr(begin, end - begin)));
    if (end == std::string_view::npos) return pieces;
    begin = end + 1;
  }
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

SpecPart parse_part(std::string_view text, std::string_view whole) {
  const std::vector<std::string_view> words = split(text, ',');
  SpecPart part;
  part.name = words[0];
  if (part.name.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("--kv \"{}\" has an empty part; write NAME or NAME,KEY=VALUE, joined by "
                    "'+' (names: {})",
                    whole, fmt::join(part_names(), ", ")));
  }
  for (const std::string_view word : std::span(words).subspan(1)) {
    const size_t equals = word.find('=');
    const std::string_view key = trim(word.substr(0, equals));
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view() : trim(word.substr(equals + 1));
    if (key.empty() || value.empty()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("--kv {} has the option \"{}\"; write it as KEY=VALUE", part.name, word));
    }
    part.options.emplace_back(key, value);
  }
  std::sort(part.options.begin(), part.options.end());
  for (size_t i = 1; i < part.options.size(); ++i) {
    if (part.options[i].first == part.options[i - 1].first) {
      throw Error(ErrorCode::kInvalidArgument, fmt::format("--kv {} gives {} twice; keep one",
                                                           part.name, part.options[i].first));
    }
  }
  return part;
}

}  // namespace

std::string_view nearest_spelling(std::string_view word,
                                  const std::vector<std::string_view>& candidates) noexcept {
  std::string_view best;
  size_t best_distance = std::string_view::npos;
  for (const std::string_view candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

CacheSpec parse_spec(std::string_view text) {
  CacheSpec spec;
  for (const std::string_view part_text : split(text, '+')) {
    SpecPart part = parse_part(part_text, text);
    const std::vector<std::string_view> names = part_names();
    if (std::find(names.begin(), names.end(), part.name) == names.end()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("--kv has no policy \"{}\"; did you mean {}? (built are {})", part.name,
                      nearest_spelling(part.name, names), fmt::join(names, ", ")));
    }
    if (!part.options.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--kv {} has no option {}: a plain format takes none; write --kv {}",
                              part.name, part.options[0].first, part.name));
    }
    spec.parts.push_back(std::move(part));
  }
  if (spec.parts.size() > 1) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("--kv \"{}\" names two formats, {} and {}, for the same slots; keep one", text,
                    spec.parts[0].name, spec.parts[1].name));
  }
  return spec;
}

std::string canonical(const CacheSpec& spec) {
  std::string text;
  for (const SpecPart& part : spec.parts) {
    if (!text.empty()) text += " + ";
    text += part.name;
    for (const auto& [key, value] : part.options) text += fmt::format(",{}={}", key, value);
  }
  return text;
}

}  // namespace kvlm
