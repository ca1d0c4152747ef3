#include "runtime/loading/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/base/printable.h"

namespace kvlm {

namespace {

using nlohmann::json;

/// "-3", "\"gelu\"", "a list": what a message says was found.
std::string describe(const json& value) {
  if (value.is_null()) return "missing";
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  if (value.is_string()) {
    return fmt::format("\"{}\"", printable(value.get_ref<const std::string&>()));
  }
  return value.dump();
}

std::string range_text(int64_t min, int64_t max) {
  if (max == std::numeric_limits<int64_t>::max()) return fmt::format("an integer from {}", min);
  return fmt::format("{} to {}", min, max);
}

/// The value as an integer, if it is exactly one; a writer may spell 14 as 14.0.
std::optional<int64_t> exact_integer(const json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (!std::in_range<int64_t>(number)) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    const auto number = value.get<double>();
    // Both bounds are exact in double; the upper one is the first value that no longer fits.
    if (!(number >= -0x1p63 && number < 0x1p63)) return std::nullopt;
    const auto whole = static_cast<int64_t>(number);
    if (static_cast<double>(whole) == number) return whole;
  }
  return std::nullopt;
}

}  // namespace

ConfigReader::ConfigReader(const nlohmann::json& object, std::string path)
    : object_(&object), path_(std::move(path)) {
  if (!object.is_object()) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} is {}; expected an object", path_, describe(object)));
  }
}

const nlohmann::json& ConfigReader::raw(std::string_view key) const {
  static const json kNull;
  const auto& members = object_->get_ref<const json::object_t&>();
  const auto place = members.find(key);
  return place == members.end() ? kNull : place->second;
}

bool ConfigReader::is_null(std::string_view key) const {
  const auto& members = object_->get_ref<const json::object_t&>();
  const auto place = members.find(key);
  return place != members.end() && place->second.is_null();
}

bool ConfigReader::has(std::string_view key) const { return !raw(key).is_null(); }

int64_t ConfigReader::integer(std::string_view key, int64_t fallback, int64_t min,
                              int64_t max) const {
  return has(key) ? required_integer(key, min, max) : fallback;
}

int64_t ConfigReader::required_integer(std::string_view key, int64_t min, int64_t max) const {
  const std::optional<int64_t> number = exact_integer(raw(key));
  if (!number || *number < min || *number > max) fail(key, range_text(min, max));
  return *number;
}

double ConfigReader::number(std::string_view key, double fallback, double min, double max) const {
  return has(key) ? required_number(key, min, max) : fallback;
}

double ConfigReader::required_number(std::string_view key, double min, double max) const {
  const json& value = raw(key);
  const double number = value.is_number() ? value.get<double>() : 0;
  if (!value.is_number() || !(number >= min && number <= max)) {
    fail(key, fmt::format("a number from {} to {}", min, max));
  }
  return number;
}

bool ConfigReader::boolean(std::string_view key, bool fallback) const {
  const json& value = raw(key);
  if (value.is_null()) return fallback;
  if (!value.is_boolean()) fail(key, "true or false");
  return value.get<bool>();
}

std::string ConfigReader::string(std::string_view key, std::string_view fallback) const {
  return has(key) ? required_string(key) : std::string(fallback);
}

std::string ConfigReader::required_string(std::string_view key) const {
  const json& value = raw(key);
  if (!value.is_string()) fail(key, "a string");
  return value.get<std::string>();
}

ConfigReader ConfigReader::object(std::string_view key) const {
  static const json kEmpty = json::object();
  const json& value = raw(key);
  if (!value.is_null() && !value.is_object()) fail(key, "an object");
  const bool nested = path_.find(": ") != std::string::npos;
  return {value.is_null() ? kEmpty : value,
          fmt::format("{}{}{}", path_, nested ? "." : ": ", printable(key))};
}

void ConfigReader::fail(std::string_view key, std::string_view expected) const {
  const bool nested = path_.find(": ") != std::string::npos;
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{}{}{} is {}; expected {}", path_, nested ? "." : ": ", printable(key),
                          describe(raw(key)), expected));
}

}  // namespace kvlm
