#include "tools/common/messages.h"

#include <algorithm>
#include <cstdio>
#include <exception>

#include "kernels/base/printable.h"

namespace kvlm {

namespace {

/// printable() of a text of any length, of which it would cut the tail.
std::string printable_whole(std::string_view text) {
  constexpr size_t kPiece = 96;  // bytes, within what printable() shows
  std::string safe;
  while (!text.empty()) {
    size_t bytes = std::min(kPiece, text.size());
    const auto continues = [&] { return (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80; };
    while (bytes < text.size() && bytes < kPiece + 3 && continues()) ++bytes;  // whole letters
    safe += printable(text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
  return safe;
}

/// Writes what `make` returns.
template <class Make>
void write_made(const Make& make) noexcept {
  try {
    write_terminal(make());
  } catch (const std::exception&) {  // no memory for a message
    std::fputs("kvlm: out of memory while writing a message\n", stderr);
  }
}

}  // namespace

std::string safe_message(std::string_view text) {
  std::string safe;
  for (;;) {
    const size_t end = text.find('\n');
    safe += printable_whole(text.substr(0, end));
    if (end == std::string_view::npos) return safe;
    safe += '\n';
    text.remove_prefix(end + 1);
  }
}

void write_terminal(std::string_view text) noexcept {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

void print_error(std::string_view program, std::string_view sentence) noexcept {
  write_made([&] { return fmt::format("{}: {}\n", program, printable_whole(sentence)); });
}

void vprint_message(fmt::string_view format, fmt::format_args arguments) noexcept {
  write_made([&] { return safe_message(fmt::vformat(format, arguments)); });
}

void print_warnings(std::span<const std::string> warnings) noexcept {
  for (const std::string& warning : warnings) print_message("vlm-run: warning: {}\n", warning);
}

}  // namespace kvlm
