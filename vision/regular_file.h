#pragma once

#include <time.h>

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
  /// Gives the descriptor back, if it has one.
  void close() noexcept;
  /// Opens the file again after close(). Calls `refuse` as the constructor does, and if it has been
  /// replaced or written to since.
  void reopen();
  /// Its size when it was opened.
  int64_t bytes() const noexcept { return bytes_; }
  /// Up to `count` bytes from `offset` on; fewer only at the end of the file.
  std::vector<std::byte> read(int64_t offset, size_t count) const;

 private:
  void open();

  std::filesystem::path path_;
  int descriptor_ = -1;
  int64_t bytes_ = 0;
  timespec changed_{};
  RefuseFile refuse_;
};

}  // namespace kvlm
