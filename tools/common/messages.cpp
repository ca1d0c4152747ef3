#include "tools/common/messages.h"

#include <cstdio>
#include <exception>
#include <string>

namespace kvlm {

void vprint_message(fmt::string_view format, fmt::format_args arguments) noexcept {
  try {
    const std::string text = fmt::vformat(format, arguments);
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  } catch (const std::exception&) {  // no memory for a message
    std::fputs("kvlm: out of memory while writing a message\n", stderr);
  }
}

void print_warnings(std::span<const std::string> warnings) noexcept {
  for (const std::string& warning : warnings) print_message("vlm-run: warning: {}\n", warning);
}

}  // namespace kvlm
