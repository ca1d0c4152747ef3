#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace kvlm::jinja {

// Python's string methods, on valid UTF-8. Case is mapped one character to one, but for ß.

std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string to_title(std::string_view text);
/// The filter of that name: words start after white space and - ( { [ <, not after an apostrophe.
std::string to_title_words(std::string_view text);
std::string to_capitalized(std::string_view text);

/// Without the white space at its ends, or the characters of *chars if not null.
std::string strip(std::string_view text, const std::string* chars, bool left, bool right);

/// Calls visit(part) for each part: at most `times` cuts, all if negative; at runs of white space
/// if separator is null.
void split(std::string_view text, const std::string* separator, int64_t times,
           const std::function<void(std::string_view)>& visit);

/// The first `times` occurrences of `from` replaced, all if negative; an empty `from` stands
/// between all characters.
std::string replaced(std::string_view text, std::string_view from, std::string_view to,
                     int64_t times);

/// repr() of a str: in quotes, with escapes.
std::string quoted(std::string_view text);
/// A JSON string, not escaped beyond need.
std::string json_quoted(std::string_view text);
/// repr() of a float.
std::string real_text(double value);

}  // namespace kvlm::jinja
