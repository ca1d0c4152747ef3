#include "runtime/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/base/printable.h"

namespace kvlm {

namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 64;

[[noreturn]] void fail_json(const std::string& name, const std::string& defect) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{}: {}; repair the file or download it again", name, defect));
}

/// "line 3, column 14" of the byte at `offset`, both counted from 1, the column in bytes.
std::string place_of(std::string_view text, size_t offset) {
  const std::string_view before = text.substr(0, offset);
  const size_t newline = before.rfind('\n');
  const size_t column = newline == std::string_view::npos ? before.size() : offset - newline - 1;
  return fmt::format("line {}, column {}", 1 + std::ranges::count(before, '\n'), column + 1);
}

/// Builds the value while it is parsed, so that duplicate keys are still visible and nesting is
/// refused before it is stored.
class StrictBuilder {
 public:
  StrictBuilder(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  json&& result() { return std::move(root_); }

  // The names below are nlohmann's SAX interface; `false` would stop the parser without a reason,
  // so every defect throws instead.
  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(int64_t value) { return add(value); }
  bool number_unsigned(uint64_t value) { return add(value); }
  bool number_float(double value, const std::string&) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(json::binary_t&) { return false; }  // has no spelling in JSON text
  bool start_object(size_t) { return open(json::object()); }
  bool end_object() { return close(); }
  bool start_array(size_t) { return open(json::array()); }
  bool end_array() { return close(); }

  bool key(std::string& key) {
    Level& level = levels_.back();
    const auto [place, inserted] =
        level.container->get_ref<json::object_t&>().emplace(key, nullptr);
    if (!inserted) {
      fail_json(name_, fmt::format("key \"{}\"{} appears twice", printable(key), where()));
    }
    level.key = key;
    value_of_key_ = &place->second;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: REASON": the reason alone
    // is worth telling; the place is ours.
    std::string_view reason = error.what();
    if (const size_t end = reason.find("] "); end != std::string_view::npos) {
      reason.remove_prefix(end + 2);
    }
    if (reason.starts_with("parse error")) {
      const size_t end = reason.find(": ");
      if (end != std::string_view::npos) reason.remove_prefix(end + 2);
    }
    const size_t offset = position == 0 ? 0 : position - 1;  // of the last byte read
    fail_json(name_, fmt::format("{}: {}", place_of(text_, offset), printable(reason)));
  }

 private:
  struct Level {
    json* container;
    std::string key;  // the latest one, of an object
  };

  json* place(json&& value) {
    if (levels_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    json& container = *levels_.back().container;
    if (container.is_array()) {
      container.push_back(std::move(value));
      return &container.back();
    }
    *value_of_key_ = std::move(value);
    return value_of_key_;
  }

  bool add(json&& value) {
    place(std::move(value));
    return true;
  }

  bool open(json&& value) {
    if (levels_.size() == kMaxDepth) {
      fail_json(name_, fmt::format("lists and objects nest deeper than {}{}", kMaxDepth, where()));
    }
    levels_.push_back({place(std::move(value)), {}});
    return true;
  }

  bool close() {
    levels_.pop_back();
    return true;
  }

  /// " in text_config.layers[2]": the container that is open, or nothing at the outermost level.
  std::string where() const {
    std::string path;
    for (size_t i = 0; i + 1 < levels_.size() && path.size() < 100; ++i) {
      const Level& level = levels_[i];
      if (level.container->is_array()) {
        path += fmt::format("[{}]", level.container->size() - 1);
      } else {
        path += (path.empty() ? "" : ".") + level.key;
      }
    }
    return path.empty() ? path : " in " + printable(path);
  }

  std::string_view text_;
  const std::string& name_;
  json root_;
  json* value_of_key_ = nullptr;
  std::vector<Level> levels_;
};

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

nlohmann::json parse_json(std::string_view text, const std::string& name) {
  if (text.starts_with("\xef\xbb\xbf")) {
    fail_json(name, "starts with a byte order mark, which JSON forbids: save it as plain UTF-8");
  }
  // nlohmann takes a NUL byte for the end of the text and would ignore what follows.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    fail_json(name, fmt::format("{}: a NUL byte", place_of(text, nul)));
  }
  StrictBuilder builder(text, name);
  if (!json::sax_parse(text.begin(), text.end(), &builder)) fail_json(name, "is not JSON");
  return builder.result();
}

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
  const json& value = raw(key);
  if (value.is_null()) return fallback;
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
