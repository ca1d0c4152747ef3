#pragma once

#include <cstring>
#include <string_view>

namespace kvlm {

/// text.find(part, from) in linear time: std::string_view::find takes quadratic time where long
/// parts almost match, which a hostile file or prompt can arrange.
inline size_t find_text(std::string_view text, std::string_view part, size_t from = 0) {
  if (from > text.size()) return text.npos;
  const void* found = ::memmem(text.data() + from, text.size() - from, part.data(), part.size());
  if (found == nullptr) return text.npos;
  return static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

}  // namespace kvlm
