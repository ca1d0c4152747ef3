#include "llm/json_part.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/unicode.h"

namespace kvlm {

namespace {

using nlohmann::json;

const json kNull;

std::string describe(const json& value) {
  if (value.is_null()) return "missing";
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  if (value.is_object()) return "an object";
  if (value.is_string()) {
    return fmt::format("\"{}\"", printable(value.get_ref<const std::string&>()));
  }
  return value.dump();
}

}  // namespace

void JsonPart::fail(std::string_view expected) const {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{}: {} is {}; expected {}, download the file again", file_,
                          place_.empty() ? "it" : place_, describe(*value_), expected));
}

JsonPart JsonPart::at(std::string_view key) const {
  if (!value_->is_object()) fail("an object");
  const auto& members = value_->get_ref<const json::object_t&>();
  const auto found = members.find(key);
  std::string place = place_.empty() ? std::string(key) : fmt::format("{}.{}", place_, key);
  return {found == members.end() ? kNull : found->second, std::move(place), file_};
}

std::vector<JsonPart> JsonPart::entries() const {
  if (!value_->is_array()) fail("a list");
  std::vector<JsonPart> parts;
  for (size_t i = 0; i < value_->size(); ++i) {
    parts.emplace_back((*value_)[i], fmt::format("{}[{}]", place_, i), file_);
  }
  return parts;
}

std::string JsonPart::text() const {
  if (!value_->is_string()) fail("a string");
  return value_->get<std::string>();
}

std::string JsonPart::text(std::string_view fallback) const {
  return is_null() ? std::string(fallback) : text();
}

bool JsonPart::flag(bool fallback) const {
  if (is_null()) return fallback;
  if (!value_->is_boolean()) fail("true or false");
  return value_->get<bool>();
}

double JsonPart::number(double fallback) const {
  if (is_null()) return fallback;
  if (!value_->is_number()) fail("a number");
  return value_->get<double>();
}

int64_t JsonPart::integer(int64_t min, int64_t max) const {
  const bool fits =
      value_->is_number_integer() &&
      (!value_->is_number_unsigned() || std::in_range<int64_t>(value_->get<uint64_t>())) &&
      value_->get<int64_t>() >= min && value_->get<int64_t>() <= max;
  if (!fits) fail(fmt::format("an integer from {} to {}", min, max));
  return value_->get<int64_t>();
}

std::string JsonPart::character() const {
  std::string character = text();
  if (character.empty() || utf8_step(character, 0).bytes != character.size()) {
    fail("one character");
  }
  return character;
}

}  // namespace kvlm
