#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string_view>
#include <vector>

namespace kvlm {

/// Throws what is to be said of a path that cannot be read: `found` is a verb and what there is
/// ("does not exist"), `pipe` whether it is one.
using RefuseFile = std::function<void(std::string_view found, bool pipe)>;

/// A regular file that is open for reading; nothing else can be opened, for a pipe or a device
/// could make a reader wait or read for ever.
class RegularFile {
 public:
  /// Never waits. Calls `refuse`, which must throw, then and when reading fails.
  RegularFile(const std::filesystem::path& path, RefuseFile refuse);
  ~RegularFile();
  RegularFile(RegularFile&& other) noexcept;
  RegularFile& operator=(RegularFile&&) = delete;

  int descriptor() const noexcept { return descriptor_; }
  /// Its size when it was opened.
  int64_t bytes() const noexcept { return bytes_; }
  /// Up to `count` bytes from `offset` on; fewer only at the end of the file.
  std::vector<std::byte> read(int64_t offset, size_t count) const;

 private:
  int descriptor_;
  int64_t bytes_ = 0;
  RefuseFile refuse_;
};

}  // namespace kvlm
