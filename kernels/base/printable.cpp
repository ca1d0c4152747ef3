#include "kernels/base/printable.h"

#include <fmt/format.h>

#include <iterator>

namespace kvlm {

std::string printable(std::string_view text) {
  constexpr size_t kLimit = 120;
  std::string out;
  for (const char c : text.substr(0, kLimit)) {
    if (c >= 0x20 && c < 0x7f) {
      out += c;
    } else {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  if (text.size() > kLimit) out += "...";
  return out;
}

}  // namespace kvlm
