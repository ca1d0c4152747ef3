#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kvlm {

/// Parses JSON strictly: valid UTF-8, one value, no duplicate keys, nesting at most 64, at most
/// 4194304 values.
/// Throws Error{kCorruptFile} naming `name` and the place.
nlohmann::json parse_json(std::string_view text, const std::string& name);

}  // namespace kvlm
