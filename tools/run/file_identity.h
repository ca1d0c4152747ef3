#pragma once

#include <string>
#include <string_view>

namespace kvlm {

/// FNV-1a of a text, 16 hex digits.
std::string hash_of(std::string_view text);

/// Hash of a file's size and of its first and last 64 KiB, so that a large one costs no more; of a
/// folder, of the names and sizes of its files. Empty if it cannot be read.
std::string content_hash(const std::string& path);

}  // namespace kvlm
