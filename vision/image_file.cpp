#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "vision/decoders.h"
#include "vision/image.h"

namespace kvlm {

namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 30;
constexpr size_t kFirstPiece = size_t{1} << 16;
constexpr char kStandardInput[] = "-";

[[noreturn]] void fail(const std::string& name, std::string_view what) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("image {} {}; give the path of {}", name, what, kReadableKinds));
}

/// A descriptor that is closed again, but for that of standard input.
class Descriptor {
 public:
  Descriptor(int number, bool owned) noexcept : number_(number), owned_(owned) {}
  ~Descriptor() {
    if (owned_) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const noexcept { return number_; }

 private:
  int number_;
  bool owned_;
};

/// Opens a regular file and nothing else. Not blocking, for a FIFO would wait for its writer.
int open_regular(const std::filesystem::path& path, const std::string& name) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
  if (descriptor < 0) {
    if (errno == ENOENT || errno == ENOTDIR) fail(name, "does not exist");
    if (errno == ENXIO) fail(name, "is a socket, not a file");
    fail(name, fmt::format("cannot be opened for reading ({})", std::strerror(errno)));
  }
  return descriptor;
}

void check_regular(const struct stat& status, const std::string& name) {
  if (S_ISDIR(status.st_mode)) fail(name, "is a directory");
  if (S_ISFIFO(status.st_mode)) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("image {} is a pipe, which may never end; give a file, or the picture "
                            "on standard input as \"-\"",
                            name));
  }
  if (!S_ISREG(status.st_mode)) fail(name, "is a device, not a file");
}

std::vector<std::byte> read_all(int descriptor, size_t expected, const std::string& name) {
  std::vector<std::byte> bytes;
  size_t filled = 0;
  // By pieces, for a pipe has no size to ask for and a file may grow.
  for (;;) {
    if (filled == bytes.size()) {
      if (filled > kMaxFileBytes) fail(name, "is longer than 1 GiB");
      // One more than is expected, so that the end is seen without growing.
      const size_t least = filled < kFirstPiece ? kFirstPiece : expected + 1;
      bytes.resize(std::min(std::max(least, filled * 2), kMaxFileBytes + 1));
    }
    const ssize_t count = ::read(descriptor, bytes.data() + filled, bytes.size() - filled);
    if (count < 0 && errno == EINTR) throw Error(ErrorCode::kCancelled, "interrupted");
    if (count < 0) fail(name, fmt::format("cannot be read ({})", std::strerror(errno)));
    if (count == 0) break;
    const bool first = filled < kFirstPiece;
    filled += static_cast<size_t>(count);
    // What is no picture is refused by its beginning, however long it is.
    if (first && filled >= kFirstPiece) check_kind(std::span(bytes).first(kFirstPiece), name);
  }
  bytes.resize(filled);
  return bytes;
}

}  // namespace

std::string image_name(const std::filesystem::path& path) {
  return path == kStandardInput ? "standard input" : path.string();
}

std::vector<std::byte> read_image(const std::filesystem::path& path) {
  const std::string name = shown_name(image_name(path));
  if (path.native().find('\0') != std::string::npos) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("image {} has a NUL in its name, which no file has; give its path "
                            "without it",
                            name));
  }
  const bool standard_input = path == kStandardInput;
  const Descriptor descriptor(standard_input ? STDIN_FILENO : open_regular(path, name),
                              !standard_input);
  struct stat status {};
  if (::fstat(descriptor.number(), &status) != 0) {
    fail(name, fmt::format("cannot be read ({})", std::strerror(errno)));
  }
  if (!standard_input) check_regular(status, name);
  const bool has_size = S_ISREG(status.st_mode) && status.st_size > 0;
  const size_t expected = has_size ? static_cast<size_t>(status.st_size) : 0;
  if (expected > kMaxFileBytes) fail(name, "is longer than 1 GiB");
  try {
    return read_all(descriptor.number(), expected, name);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("image {} needs more memory than there is to be read; free some, or "
                            "scale it down first",
                            name));
  }
}

Image load_image(const std::filesystem::path& path, Orientation orientation) {
  return decode_image(read_image(path), image_name(path), orientation);
}

ImageInfo probe_image(const std::filesystem::path& path, Orientation orientation) {
  return probe_image(read_image(path), image_name(path), orientation);
}

}  // namespace kvlm
