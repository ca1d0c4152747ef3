#include "llm/strict_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"

// JSON from files that are not trusted, through nlohmann's SAX interface: invalid UTF-8, duplicate
// keys, deep nesting and too many values are refused with line and column before they take memory.
namespace kvlm {

namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 64;
/// Twice what the largest published tokenizer.json holds. A value takes up to 100 times the memory
/// of its text, as in "[],".
constexpr size_t kMaxValues = size_t{1} << 22;

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
    if (++values_ > kMaxValues) {
      fail_json(name_,
                fmt::format("holds more than {} values, which no model file has", kMaxValues));
    }
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
  size_t values_ = 0;
  std::vector<Level> levels_;
};

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

}  // namespace kvlm
