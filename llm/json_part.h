#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// A value somewhere in a tokenizer.json, with its place for messages. Absent reads as null. Every
/// reader throws Error{kCorruptFile} "FILE: PLACE is FOUND; expected EXPECTED, download it again".
class JsonPart {
 public:
  JsonPart(const nlohmann::json& value, std::string place, std::string file)
      : value_(&value), place_(std::move(place)), file_(std::move(file)) {}

  /// A member; this must be an object.
  JsonPart at(std::string_view key) const;
  /// The entries; this must be a list.
  std::vector<JsonPart> entries() const;

  bool is_null() const noexcept { return value_->is_null(); }
  std::string text() const;
  /// Null reads as the fallback.
  std::string text(std::string_view fallback) const;
  bool flag(bool fallback) const;
  double number(double fallback) const;
  int64_t integer(int64_t min, int64_t max) const;
  /// A string of exactly one character.
  std::string character() const;

  const nlohmann::json& value() const noexcept { return *value_; }
  const std::string& file() const noexcept { return file_; }
  [[noreturn]] void fail(std::string_view expected) const;

 private:
  const nlohmann::json* value_;
  std::string place_;  // "normalizer.normalizers[3]"; empty: the file
  std::string file_;
};

}  // namespace kvlm
