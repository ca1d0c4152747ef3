#pragma once

#include <fmt/format.h>

#include <span>
#include <string>
#include <string_view>

namespace kvlm {

/// A message as the terminal gets it: line ends stay, everything else that printable() escapes is
/// escaped, whatever it is from (a name, an argument, an environment variable, a library).
std::string safe_message(std::string_view text);

/// Writes text to stderr as it is, in one piece: for what moves the cursor. Never throws: a stderr
/// that is closed, full or whose reader has gone loses the text and stops nothing.
void write_terminal(std::string_view text) noexcept;

/// Writes the line "PROGRAM: SENTENCE" to stderr; line ends within the sentence are escaped too.
/// Never throws, as write_terminal().
void print_error(std::string_view program, std::string_view sentence) noexcept;

/// Writes formatted text to stderr through safe_message(). Never throws, as write_terminal().
void vprint_message(fmt::string_view format, fmt::format_args arguments) noexcept;

/// vprint_message() of what fmt::format() takes.
template <class... Arguments>
void print_message(fmt::format_string<Arguments...> format, Arguments&&... arguments) noexcept {
  vprint_message(fmt::string_view(format), fmt::make_format_args(arguments...));
}

/// "vlm-run: warning: SENTENCE" for each.
void print_warnings(std::span<const std::string> warnings) noexcept;

}  // namespace kvlm
