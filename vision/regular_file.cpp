#include "vision/regular_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvlm {

namespace {

std::string failure(const char* what) {
  return fmt::format("cannot be {} ({})", what, std::strerror(errno));
}

}  // namespace

RegularFile::RegularFile(const std::filesystem::path& path, RefuseFile refuse)
    : path_(path), refuse_(std::move(refuse)) {
  try {
    open();
  } catch (...) {
    close();
    throw;
  }
}

void RegularFile::open() {
  // Not blocking, for a FIFO would wait for its writer.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
  if (descriptor_ < 0) {
    if (errno == ENOENT || errno == ENOTDIR) refuse_("does not exist", false);
    if (errno == ENXIO) refuse_("is a socket, not a file", false);
    refuse_(failure("opened for reading"), false);
  }
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) refuse_(failure("read"), false);
  if (S_ISDIR(status.st_mode)) refuse_("is a directory", false);
  if (S_ISFIFO(status.st_mode)) refuse_("is a pipe, which may never end", true);
  if (!S_ISREG(status.st_mode)) refuse_("is a device, not a file", false);
  bytes_ = status.st_size;
  changed_ = status.st_mtim;
}

void RegularFile::close() noexcept {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

void RegularFile::reopen() {
  const int64_t bytes = bytes_;
  const timespec changed = changed_;
  open();
  if (bytes_ == bytes && changed_.tv_sec == changed.tv_sec && changed_.tv_nsec == changed.tv_nsec) {
    return;
  }
  close();
  bytes_ = bytes;
  changed_ = changed;
  refuse_("was changed after it was opened", false);
}

RegularFile::~RegularFile() { close(); }

RegularFile::RegularFile(RegularFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      bytes_(other.bytes_),
      changed_(other.changed_),
      refuse_(std::move(other.refuse_)) {}

std::vector<std::byte> RegularFile::read(int64_t offset, size_t count) const {
  const int64_t left = std::max<int64_t>(bytes_ - offset, 0);
  std::vector<std::byte> bytes(std::min(count, static_cast<size_t>(left)));
  size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t got = ::pread(descriptor_, bytes.data() + filled, bytes.size() - filled,
                                offset + static_cast<int64_t>(filled));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse_(failure("read"), false);
    if (got == 0) break;  // it has become shorter
    filled += static_cast<size_t>(got);
  }
  bytes.resize(filled);
  return bytes;
}

}  // namespace kvlm
