#pragma once

#include <cstdlib>
#include <string_view>

#include "kernels/base/error.h"
#include "llm/unicode.h"

namespace kvlm::fuzz {

inline void require(bool condition) {
  if (!condition) std::abort();
}

/// Whether `body` ended without an Error. One must be of a file, and a message that can be printed.
template <class Body>
bool succeeds(const Body& body) {
  try {
    body();
    return true;
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kCorruptFile || error.code() == ErrorCode::kUnsupported);
    const std::string_view message = error.what();
    require(is_valid_utf8(message) && message.size() < 20'000);
    for (const char c : message) require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
    return false;
  }
}

}  // namespace kvlm::fuzz
