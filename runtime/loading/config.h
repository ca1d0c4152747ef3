#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "kernels/base/error.h"
#include "llm/strict_json.h"

namespace kvlm {

/// A JSON object of a configuration file, read field by field with a message that names the file
/// and the key. Absent keys (and JSON null) take the default; a wrong type or a value outside the
/// range throws Error{kCorruptFile}: "config.json: text_config.hidden_size is -3; expected 1 to
/// 1048576".
class ConfigReader {
 public:
  /// `path` is "config.json" or "config.json: vision_config".
  ConfigReader(const nlohmann::json& object, std::string path);

  bool has(std::string_view key) const;
  /// The file says null, which for a few keys means another thing than their absence.
  bool is_null(std::string_view key) const;
  int64_t integer(std::string_view key, int64_t fallback, int64_t min, int64_t max) const;
  int64_t required_integer(std::string_view key, int64_t min, int64_t max) const;
  double number(std::string_view key, double fallback, double min, double max) const;
  double required_number(std::string_view key, double min, double max) const;
  bool boolean(std::string_view key, bool fallback) const;
  std::string string(std::string_view key, std::string_view fallback) const;
  std::string required_string(std::string_view key) const;
  /// A nested object; an absent one reads as empty, so that every field takes its default.
  ConfigReader object(std::string_view key) const;
  /// The raw value, or JSON null.
  const nlohmann::json& raw(std::string_view key) const;
  const std::string& path() const noexcept { return path_; }
  /// Throws Error{kCorruptFile} "PATH: KEY is FOUND; expected EXPECTED".
  [[noreturn]] void fail(std::string_view key, std::string_view expected) const;

 private:
  const nlohmann::json* object_;
  std::string path_;
};

}  // namespace kvlm
