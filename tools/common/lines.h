#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace kvlm {

/// What a line of a file of records may have: a prompt of a million words.
inline constexpr size_t kMaxLineBytes = size_t{16} << 20;

/// Calls body(number, line), counted from 1 and without their ends, for the lines of a file, or of
/// a pipe, until it returns false. Throws Error{kCorruptFile} starting with `name` if the file
/// cannot be read or a line is longer than kMaxLineBytes.
void for_each_line(const std::string& path, std::string_view name,
                   const std::function<bool(int number, std::string_view line)>& body);

}  // namespace kvlm
