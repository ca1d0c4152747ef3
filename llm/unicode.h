#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvlm {

/// What stands at one place of a byte string read as UTF-8.
struct Utf8Step {
  char32_t value = 0;  ///< the scalar, if `valid`
  size_t bytes = 1;    ///< its length; if not valid, the longest prefix of a sequence found there
  bool valid = false;  ///< a well-formed sequence (no surrogates, no overlong forms)
  bool truncated = false;  ///< not valid only because the text ends inside the sequence
};

/// The sequence at text[pos]; pos < text.size().
Utf8Step utf8_step(std::string_view text, size_t pos);

/// Appends one scalar, which must be valid.
void append_utf8(std::string& out, char32_t value);

bool is_valid_utf8(std::string_view text);

/// Appends `text` with every ill-formed sequence (its maximal subpart) as one U+FFFD, up to a
/// truncated sequence at the end; returns the bytes consumed, text.size() unless truncated.
size_t append_lossy_utf8(std::string& out, std::string_view text);

/// Unicode White_Space.
bool is_white_space(char32_t c);

/// The word characters of UTS 18: alphabetic, marks, decimal digits, connectors, joiners.
bool is_word_char(char32_t c);

/// Python's str.isprintable() for one character: no control, format, unassigned or private one, and
/// no separator but the space.
bool is_printable(char32_t c);

/// Simple case mapping: one character to one.
char32_t upper_case(char32_t c);
char32_t lower_case(char32_t c);

/// Normalisation form C of valid UTF-8. Throws Error{kInvalidArgument} if it is not valid.
std::string to_nfc(std::string_view text);

}  // namespace kvlm
