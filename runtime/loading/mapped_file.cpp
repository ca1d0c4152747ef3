#include "runtime/loading/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"

namespace kvlm {

namespace {

/// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

const char* cure_of(int error) {
  switch (error) {
    case EACCES:
    case EPERM:
      return "make the file and its folders readable for you";
    case ENOENT:
    case ENOTDIR:
      return "give the path of a file that is there";
    case EMFILE:
    case ENFILE:
      return "raise the limit on open files (ulimit -n)";
    case ENOMEM:
      return "free memory, or raise ulimit -v";
    default:
      return "give a file on a file system that can be read";
  }
}

[[noreturn]] void fail_errno(const std::string& name, const char* action) {
  const int error = errno;
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{}: cannot {} it: {}; {}", name, action,
                          std::generic_category().message(error), cure_of(error)));
}

/// A mapping as mapped_file_at() finds it: `begin` is set last and cleared first.
struct Mapping {
  std::atomic<uintptr_t> begin{0};
  std::atomic<size_t> bytes{0};
  std::atomic<const char*> name{nullptr};
};
/// More than the shards of any model; further files are not found.
std::array<Mapping, 1024> mappings;

void enter(const void* data, size_t bytes, const char* name) noexcept {
  constexpr uintptr_t kTaken = 1;  // no address of a mapping
  for (Mapping& mapping : mappings) {
    uintptr_t free = 0;
    if (!mapping.begin.compare_exchange_strong(free, kTaken)) continue;
    mapping.bytes = bytes;
    mapping.name = name;
    mapping.begin = reinterpret_cast<uintptr_t>(data);
    return;
  }
}

void leave(const void* data) noexcept {
  for (Mapping& mapping : mappings) {
    uintptr_t begin = reinterpret_cast<uintptr_t>(data);
    if (mapping.begin.compare_exchange_strong(begin, 0)) return;
  }
}

size_t regular_size(const Descriptor& file, const std::string& name) {
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) fail_errno(name, "examine");
  if (!S_ISREG(info.st_mode)) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{}: not a regular file; put the file itself there", name));
  }
  if (!std::in_range<size_t>(info.st_size)) fail_errno(name, "address all of");
  return static_cast<size_t>(info.st_size);
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path, const std::string& name)
    : name_(printable(name)) {
  // Non-blocking, so that a named pipe is refused below rather than waited for.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) fail_errno(name, "open");
  const size_t bytes = regular_size(file, name);
  if (bytes == 0) return;  // an empty mapping is not allowed
  void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) fail_errno(name, "map");
  data_ = data;
  bytes_ = bytes;
  struct stat now {};
  if (::fstat(file.get(), &now) != 0 || !std::cmp_equal(now.st_size, bytes)) {
    ::munmap(data, bytes);  // the destructor does not run for a constructor that throws
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{}: changes size while it is opened; wait until it is written", name));
  }
  enter(data_, bytes_, name_.c_str());
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  leave(data_);
  ::munmap(data_, bytes_);
}

const char* mapped_file_at(const void* address) noexcept {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (const Mapping& mapping : mappings) {
    const uintptr_t begin = mapping.begin;
    if (begin > 1 && at >= begin && at - begin < mapping.bytes) return mapping.name;
  }
  return nullptr;
}

void MappedFile::read_ahead() const noexcept {
  if (data_ != nullptr) ::madvise(data_, bytes_, MADV_WILLNEED);
}

}  // namespace kvlm
