#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <optional>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "vision/decoders.h"
#include "vision/image.h"
#include "vision/regular_file.h"

namespace kvlm {

namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 30;
constexpr size_t kFirstPiece = size_t{1} << 16;
constexpr char kStandardInput[] = "-";

[[noreturn]] void fail(const std::string& name, std::string_view what) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("image {} {}; give the path of {}", name, what, readable_kinds()));
}

/// Opens a regular file and nothing else.
RegularFile open_regular(const std::filesystem::path& path, const std::string& name) {
  return RegularFile(path, [&name](std::string_view found, bool pipe) {
    if (!pipe) fail(name, found);
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("image {} {}; give a file, or the image on standard input as \"-\"",
                            name, found));
  });
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
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "image {} has a NUL in its name, which no file name can hold; give its path without it",
            name));
  }
  std::optional<RegularFile> file;
  if (path != kStandardInput) file.emplace(open_regular(path, name));
  const size_t expected = file ? static_cast<size_t>(file->bytes()) : 0;
  if (expected > kMaxFileBytes) fail(name, "is longer than 1 GiB");
  try {
    return read_all(file ? file->descriptor() : STDIN_FILENO, expected, name);
  } catch (const std::bad_alloc&) {
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("image {} cannot be read: out of memory; free some, or scale it down first",
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
