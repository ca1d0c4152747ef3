#include "kvcache/spec/policy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cassert>
#include <charconv>
#include <cmath>
#include <limits>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/words.h"

// Options of policies: legal values, canonical spelling, defaults by profile, and error messages.
// The tables are in the policies' files.
namespace kvlm {

namespace {

using Type = OptionInfo::Type;

constexpr OptionInfo kScope{.key = "scope",
                            .choices = "all|visual|text",
                            .standard = "all",
                            .help =
                                "tokens that this quantizer packs. all: every token; visual: those "
                                "of images and videos; text: the others"};

constexpr OptionInfo kLayers{.key = "layers",
                             .type = Type::kLayers,
                             .low = 0,
                             .high = kMaxSpecLayers - 1,
                             .help =
                                 "layers that this quantizer packs, for example 0-1/30; a "
                                 "quantizer of the same scope without layers= packs the others"};

constexpr OptionInfo kRotate{
    .key = "rotate",
    .choices = "off|hadamard|keys",
    .standard = "off",
    .help =
        "hadamard: keys and values are stored rotated by a Hadamard matrix over the channels of a "
        "head, which spreads outliers; keys: keys alone; off: neither"};

constexpr OptionInfo kProfile{.key = "profile",
                              .choices = "default|official|paper",
                              .standard = "default",
                              .help =
                                  "where the other options take their defaults from. default: this "
                                  "project; official: the published code; paper: the text of the "
                                  "paper. An option that you write wins over its profile"};

/// The whole text as a number. '+' is no sign, because it joins parts.
template <class Number>
std::optional<Number> whole_number(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::optional<double> real_number(std::string_view text) {
  const size_t slash = text.find('/');
  std::optional<double> number = whole_number<double>(text.substr(0, slash));
  if (number && slash != std::string_view::npos) {
    const std::optional<double> divisor = whole_number<double>(text.substr(slash + 1));
    if (!divisor) return std::nullopt;
    *number /= *divisor;
  }
  if (!number || !std::isfinite(*number)) return std::nullopt;
  return *number == 0 ? 0 : number;  // no negative zero
}

/// The shortest text that reads back as the same number, without the '+' of an exponent.
std::string shortest(double number) {
  std::string text = fmt::format("{}", number);
  std::erase(text, '+');
  return text;
}

bool in_range(const OptionInfo& option, double number) {
  return number >= option.low && (option.open_high ? number < option.high : number <= option.high);
}

std::optional<std::string> checked_real(const OptionInfo& option, std::string_view value) {
  const std::optional<double> number = real_number(value);
  if (!number || !in_range(option, *number)) return std::nullopt;
  return shortest(*number);
}

std::optional<std::string> checked_integer(const OptionInfo& option, std::string_view value) {
  const std::optional<int64_t> number = whole_number<int64_t>(value);
  if (!number || !in_range(option, static_cast<double>(*number))) return std::nullopt;
  return fmt::format("{}", *number);
}

/// Applies `check` on both sides of a ':'.
template <class Check>
std::optional<std::string> checked_pair(const OptionInfo& option, std::string_view value,
                                        const Check& check) {
  const size_t colon = value.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::optional<std::string> first = check(option, value.substr(0, colon));
  const std::optional<std::string> second = check(option, value.substr(colon + 1));
  if (!first || !second) return std::nullopt;
  return *first + ":" + *second;
}

std::optional<std::string> checked_start(const OptionInfo& option, std::string_view value) {
  return value == "off" ? std::string(value) : checked_integer(option, value);
}

/// The canonical spelling, or nothing if `value` is illegal.
std::optional<std::string> checked(const OptionInfo& option, std::string_view value) {
  switch (option.type) {
    case Type::kChoice: {
      const std::vector<std::string_view> choices = split_words(option.choices, '|');
      if (std::find(choices.begin(), choices.end(), value) == choices.end()) return std::nullopt;
      return std::string(value);
    }
    case Type::kInteger:
      return checked_integer(option, value);
    case Type::kReal:
      return checked_real(option, value);
    case Type::kRealPair:
      return checked_pair(option, value, checked_real);
    case Type::kChannels:
      return value == "auto" ? std::string(value) : checked_integer(option, value);
    case Type::kStartLayers:
      return checked_pair(option, value, checked_start);
    case Type::kLayers: {
      const std::optional<LayerRanges> ranges = parse_layer_ranges(value);
      if (!ranges) return std::nullopt;
      return layer_ranges_text(*ranges);
    }
  }
  return std::nullopt;
}

/// The choice that was probably meant: the nearest number or spelling. If the first choice is
/// off, a word for yes means the second.
std::string nearest_choice(const std::vector<std::string_view>& choices, std::string_view value) {
  if (choices.size() == 1) return std::string(choices[0]);
  const std::optional<double> number = real_number(value);
  if (number && real_number(choices[0])) {
    return std::string(*std::ranges::min_element(choices, {}, [&](std::string_view choice) {
      return std::abs(real_number(choice).value_or(*number) - *number);
    }));
  }
  const std::string_view nearest = nearest_spelling(value, choices);
  if (!nearest.empty() || choices[0] != "off") return std::string(nearest);
  constexpr std::string_view kOn[] = {"yes", "on", "true", "1"};
  return std::string(std::ranges::find(kOn, value) == std::end(kOn) ? "" : choices[1]);
}

/// The legal value that was probably meant; empty if unknown.
std::string nearest_value(const OptionInfo& option, std::string_view value) {
  const std::string fallback(option.standard.empty() ? shortest(option.low)
                                                     : std::string(option.standard));
  switch (option.type) {
    case Type::kChoice:
      return nearest_choice(split_words(option.choices, '|'), value);
    case Type::kInteger:
    case Type::kChannels: {
      const std::optional<double> number = real_number(value);
      if (!number) return fallback;
      return shortest(std::clamp(std::nearbyint(*number), option.low, option.high));
    }
    case Type::kReal: {
      // a share written as percent
      const bool percent = value.ends_with('%');
      const std::optional<double> number = real_number(value.substr(0, value.size() - percent));
      if (number && option.high == 1 && (percent || *number >= 5) && *number <= 100 &&
          *number / 100 >= option.low && !(option.open_high && *number == 100)) {
        return shortest(*number / 100);
      }
      if (!number || percent || (option.open_high && *number >= option.high)) return fallback;
      return shortest(std::clamp(*number, option.low, option.high));
    }
    case Type::kLayers:
      return "0-1/30";
    case Type::kRealPair:
    case Type::kStartLayers:
      return fallback;
  }
  return fallback;
}

const OptionInfo* find_option(const PolicyInfo& info, std::string_view key) {
  for (const OptionInfo* option : options_of(info)) {
    if (option->key == key) return option;
  }
  return nullptr;
}

[[noreturn]] void refuse_key(const PolicyInfo& info, std::string_view key) {
  std::vector<std::string_view> keys;
  for (const OptionInfo* option : options_of(info)) keys.push_back(option->key);
  const bool misplaced =
      info.kind != PartKind::kQuantizer && (key == kScope.key || key == kLayers.key);
  const std::string_view nearest = nearest_spelling(key, keys);
  const std::string hint = misplaced         ? "; only quantizers have scope= and layers="
                           : nearest.empty() ? ""
                                             : fmt::format("; did you mean {}?", nearest);
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("--kv {} has no option {}{} (its options are {})", info.name,
                          printable(key), hint, fmt::join(keys, ", ")));
}

std::string_view value_in(const OptionInfo& option, std::string_view profile) {
  if (profile == "official" && !option.official.empty()) return option.official;
  if (profile == "paper" && !option.paper.empty()) return option.paper;
  return option.standard;
}

}  // namespace

std::vector<const OptionInfo*> options_of(const PolicyInfo& info) {
  std::vector<const OptionInfo*> options;
  for (const OptionInfo& option : info.options) options.push_back(&option);
  const auto has_own = [&](const OptionInfo& shared) {
    return std::ranges::any_of(info.options,
                               [&](const auto& own) { return own.key == shared.key; });
  };
  if (info.kind == PartKind::kQuantizer) {
    if (!has_own(kScope)) options.push_back(&kScope);
    options.push_back(&kLayers);
    // Unpacked tokens need no rotation.
    if (!info.options.empty() && !has_own(kRotate)) options.push_back(&kRotate);
  }
  // Plain formats and sharing parts have no publication, so no profile.
  if (info.kind != PartKind::kSharing && !info.options.empty()) options.push_back(&kProfile);
  return options;
}

std::string legal_values(const OptionInfo& option) {
  const auto range = [&] {
    return fmt::format("from {} to {}{}", shortest(option.low), option.open_high ? "below " : "",
                       shortest(option.high));
  };
  switch (option.type) {
    case Type::kChoice:
      return fmt::format("{}", fmt::join(split_words(option.choices, '|'), ", "));
    case Type::kInteger:
      return "an integer " + range();
    case Type::kReal:
      return "a number " + range();
    case Type::kRealPair:
      return fmt::format("two numbers A:B, each {}", range());
    case Type::kChannels:
      return "auto or an integer " + range();
    case Type::kStartLayers:
      return fmt::format("KEYS:VALUES, each off or a layer {}", range());
    case Type::kLayers:
      return fmt::format("layers {}, and ranges of them, joined by '/'", range());
  }
  return {};
}

std::string checked_value(std::string_view part, const OptionInfo& option, std::string_view value) {
  if (std::optional<std::string> text = checked(option, value)) return *std::move(text);
  const std::string nearest = nearest_value(option, value);
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("--kv {} has no {}={}{} (legal: {})", part, option.key, printable(value),
                  nearest.empty() ? "" : fmt::format("; did you mean {}={}?", option.key, nearest),
                  legal_values(option)));
}

OptionValues::OptionValues(const PolicyInfo& info, const SpecPart& part) : info_(&info) {
  for (const auto& [key, value] : part.options) {
    const OptionInfo* option = find_option(info, key);
    if (option == nullptr) refuse_key(info, key);
    values_[key] = checked_value(info.name, *option, value);
    given_.push_back(key);
  }
  const auto profile = values_.find(kProfile.key);
  const std::string name = profile == values_.end() ? "default" : profile->second;
  for (const OptionInfo* option : options_of(info)) {
    values_.try_emplace(std::string(option->key), value_in(*option, name));
  }
}

bool OptionValues::has(std::string_view key) const noexcept {
  return values_.find(key) != values_.end();
}

bool OptionValues::given(std::string_view key) const noexcept {
  return std::find(given_.begin(), given_.end(), key) != given_.end();
}

std::string_view OptionValues::text(std::string_view key) const {
  const auto found = values_.find(key);
  assert(found != values_.end());
  return found->second;
}

int OptionValues::integer(std::string_view key) const {
  return whole_number<int>(text(key)).value_or(-1);
}

double OptionValues::real(std::string_view key) const {
  const std::optional<double> number = real_number(text(key));
  assert(number);
  return *number;
}

std::pair<double, double> OptionValues::real_pair(std::string_view key) const {
  const std::string_view value = text(key);
  const size_t colon = value.find(':');
  assert(colon != std::string_view::npos);
  return {*real_number(value.substr(0, colon)), *real_number(value.substr(colon + 1))};
}

std::pair<int, int> OptionValues::start_layers(std::string_view key) const {
  const std::string_view value = text(key);
  const size_t colon = value.find(':');
  const auto start = [](std::string_view layer) {
    return whole_number<int>(layer).value_or(std::numeric_limits<int>::max());
  };
  return {start(value.substr(0, colon)), start(value.substr(colon + 1))};
}

void refuse_idle(const OptionValues& options, std::string_view key, bool idle,
                 std::string_view because) {
  if (!idle || !options.given(key)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("--kv {},{}={} has no effect: {}; drop it", options.info().name, key,
                          options.text(key), because));
}

}  // namespace kvlm
