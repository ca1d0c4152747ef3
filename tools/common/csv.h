#pragma once

#include <string>
#include <string_view>

namespace kvlm {

/// A text as a field of comma-separated values, quoted.
inline std::string csv_field(std::string_view text) {
  std::string field = "\"";
  for (const char letter : text) {
    if (letter == '"') field += '"';
    field += letter;
  }
  return field + '"';
}

}  // namespace kvlm
