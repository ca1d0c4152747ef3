#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// Bytes of a file in memory under a path, for readers that take paths.
class MemoryFile {
 public:
  /// Throws Error{kOutOfMemory}.
  explicit MemoryFile(const std::vector<std::byte>& content);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::filesystem::path path() const;

 private:
  int descriptor_;
};

/// Reads what the URLs of requests stand for: data: URLs, and file: URLs below a folder if there is
/// one. Opens no connection.
class MediaReader {
 public:
  /// An empty `root` allows no files. Throws Error{kInvalidArgument} for one that is no folder.
  explicit MediaReader(std::string root);
  ~MediaReader();
  MediaReader(const MediaReader&) = delete;
  MediaReader& operator=(const MediaReader&) = delete;

  /// `name` is how messages call it. At most `most` bytes. Throws ApiError: another scheme, bad
  /// base64, a file outside the root, which reads as missing.
  std::vector<std::byte> read(std::string_view url, const std::string& name, size_t most) const;

 private:
  std::vector<std::byte> read_file(std::string_view url, const std::string& name,
                                   size_t most) const;

  std::string root_;  // canonical
  int descriptor_ = -1;
};

/// The bytes of standard base64 with padding. Throws ApiError.
std::vector<std::byte> decode_base64(std::string_view text, const std::string& name);

}  // namespace kvlm
