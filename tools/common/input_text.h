#pragma once

#include <cstddef>
#include <string>

namespace kvlm {

/// Name of standard input on the command line.
inline constexpr const char* kStandardInput = "-";

/// All bytes of a file, a pipe, or standard input ("-"), at most `limit`. `flag` is what named it
/// ("--batch in.jsonl") and `expected` what to give ("a file of JSON records"), for messages.
/// Throws Error{kCorruptFile} if it is a folder, cannot be read, or is longer; Error{kCancelled} if
/// the program is interrupted while it waits.
std::string read_input(const std::string& path, size_t limit, const std::string& flag,
                       const std::string& expected);

}  // namespace kvlm
