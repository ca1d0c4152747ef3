#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace kvlm {

/// A whole file, mapped read-only for as long as the object lives. Neither copied nor moved: it is
/// shared by pointer.
class MappedFile {
 public:
  /// Follows links. `name` is how messages call the file.
  /// Throws Error{kCorruptFile} if the file cannot be opened, is not a regular file or changes size
  /// while it is opened.
  MappedFile(const std::filesystem::path& path, const std::string& name);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const noexcept {
    return {static_cast<const std::byte*>(data_), bytes_};
  }
  /// Asks the kernel to start reading the file; does not wait.
  void read_ahead() const noexcept;

 private:
  std::string name_;      // fit for messages
  void* data_ = nullptr;  // read-only, whatever the type that munmap takes says
  size_t bytes_ = 0;
};

/// The mapped file that has this address, by the name of its messages; null if none has. For a
/// handler of SIGBUS, which is what reading a file costs that somebody else has cut meanwhile:
/// touches no lock and allocates nothing.
const char* mapped_file_at(const void* address) noexcept;

}  // namespace kvlm
