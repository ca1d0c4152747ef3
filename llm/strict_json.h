#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kvlm {

/// Parses one JSON value: valid UTF-8, no duplicate keys, nesting at most 64. Throws
/// Error{kCorruptFile} naming `name` and the place. The runtime's parse_json is the same rule for
/// configuration files; this one exists because llm/ stands below runtime/.
nlohmann::json parse_strict_json(std::string_view text, const std::string& name);

}  // namespace kvlm
