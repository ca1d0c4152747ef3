#include "kernels/base/printable.h"

#include <fmt/format.h>

#include <bit>
#include <cstdint>
#include <iterator>

namespace kvlm {

namespace {

/// The code point that starts `text`, and its bytes; no bytes if they are not UTF-8.
struct CodePoint {
  uint32_t value;
  size_t bytes;
};

CodePoint first_of(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const auto bytes = static_cast<size_t>(std::countl_one(byte(0)));
  if (bytes == 0) return {byte(0), 1};
  if (bytes == 1 || bytes > 4 || bytes > text.size()) return {0, 0};
  uint32_t value = byte(0) & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0u) != 0x80) return {0, 0};
    value = value << 6 | (byte(i) & 0x3fu);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};  // less is an overlong spelling
  const bool surrogate = value >= 0xd800 && value < 0xe000;
  if (value < kLeast[bytes] || value > 0x10ffff || surrogate) return {0, 0};
  return {value, bytes};
}

bool shows(uint32_t c) {
  const auto within = [&](uint32_t first, uint32_t last) { return c >= first && c <= last; };
  return !(c < 0x20 || within(0x7f, 0x9f) || c == 0xad || c == 0x61c || within(0x200b, 0x200f) ||
           within(0x2028, 0x202e) || within(0x2060, 0x206f) || c == 0xfeff ||
           within(0xe000, 0xf8ff) || within(0xfff0, 0xfffb) || (c & 0xfffe) == 0xfffe ||
           within(0xe0000, 0x10ffff));
}

}  // namespace

std::string printable(std::string_view text) {
  constexpr size_t kLimit = 120;
  std::string out;
  size_t done = 0;
  while (done < text.size() && done < kLimit) {
    const CodePoint c = first_of(text.substr(done));
    if (c.bytes == 0) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<uint8_t>(text[done]));
    } else if (shows(c.value)) {
      out += text.substr(done, c.bytes);
    } else if (c.value < 0x80) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", c.value);
    } else {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", c.value);
    }
    done += c.bytes == 0 ? 1 : c.bytes;
  }
  if (done < text.size()) out += "...";
  return out;
}

}  // namespace kvlm
