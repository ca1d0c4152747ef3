#pragma once

#include <fmt/format.h>

#include <span>
#include <string>

namespace kvlm {

/// Writes formatted text to stderr, in one piece. Never throws: a stderr that is closed, full or
/// whose reader has gone loses the text and stops nothing.
void vprint_message(fmt::string_view format, fmt::format_args arguments) noexcept;

/// vprint_message() of what fmt::format() takes.
template <class... Arguments>
void print_message(fmt::format_string<Arguments...> format, Arguments&&... arguments) noexcept {
  vprint_message(fmt::string_view(format), fmt::make_format_args(arguments...));
}

/// "vlm-run: warning: SENTENCE" for each.
void print_warnings(std::span<const std::string> warnings) noexcept;

}  // namespace kvlm
