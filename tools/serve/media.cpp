#include "tools/serve/media.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/openat2.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/base/printable.h"
#include "tools/common/file_name.h"
#include "tools/serve/api_error.h"

// Files are opened relative to the root's descriptor by the kernel's own rule that nothing outside
// it is reached (RESOLVE_BENEATH), and read from the descriptor that was opened.
namespace kvlm {

namespace {

constexpr std::string_view kBase64 =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void read_all(int descriptor, std::byte* to, size_t bytes) {
  while (bytes > 0) {
    const ssize_t count = read(descriptor, to, bytes);
    if (count <= 0) throw ApiError(404, "media_not_found", "the file cannot be read", "messages");
    to += count;
    bytes -= static_cast<size_t>(count);
  }
}

}  // namespace

MemoryFile::MemoryFile(const std::vector<std::byte>& content)
    : descriptor_(memfd_create("video", MFD_CLOEXEC)) {
  size_t written = 0;
  while (descriptor_ >= 0 && written < content.size()) {
    const ssize_t count = write(descriptor_, content.data() + written, content.size() - written);
    if (count <= 0) break;
    written += static_cast<size_t>(count);
  }
  if (descriptor_ >= 0 && written == content.size()) return;
  if (descriptor_ >= 0) close(descriptor_);
  throw Error(
      ErrorCode::kOutOfMemory,
      fmt::format("no memory for a video of {}; send a smaller one", human_bytes(content.size())));
}

MemoryFile::~MemoryFile() { close(descriptor_); }

std::filesystem::path MemoryFile::path() const {
  return fmt::format("/proc/self/fd/{}", descriptor_);
}

MediaReader::MediaReader(std::string root) {
  if (root.empty()) return;
  std::error_code error;
  root_ = std::filesystem::canonical(root, error).string();
  if (!error) descriptor_ = open(root_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (descriptor_ < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--media-root is {}, which is no folder that can be opened; give one",
                            printable(root)));
  }
}

MediaReader::~MediaReader() {
  if (descriptor_ >= 0) close(descriptor_);
}

std::vector<std::byte> decode_base64(std::string_view text, const std::string& name) {
  const auto fail = [&](const std::string& what) {
    throw ApiError(400, "invalid_image",
                   fmt::format("{}: {}; send standard base64 with padding", name, what),
                   "messages");
  };
  if (text.empty()) fail("the data: URL is empty");
  if (text.size() % 4 != 0) fail(fmt::format("base64 of {} letters is cut", text.size()));
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  const std::string_view letters = text.substr(0, text.size() - padding);
  if (const size_t bad = letters.find_first_not_of(kBase64); bad != std::string_view::npos) {
    fail(fmt::format("letter {} of its data is no base64", bad + 1));
  }
  std::vector<std::byte> bytes(text.size() / 4 * 3);
  const int count = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                                    reinterpret_cast<const unsigned char*>(text.data()),
                                    static_cast<int>(text.size()));
  if (count < 0) fail("its data is no base64");
  bytes.resize(static_cast<size_t>(count) - padding);
  return bytes;
}

std::vector<std::byte> MediaReader::read(std::string_view url, const std::string& name,
                                         size_t most) const {
  const auto colon = url.find(':');
  std::string scheme(url.substr(0, std::min(colon, url.size())));
  std::ranges::transform(scheme, scheme.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (scheme == "data") {
    const auto comma = url.find(',');
    if (comma == std::string_view::npos || !url.substr(0, comma).ends_with(";base64")) {
      throw ApiError(400, "invalid_image",
                     fmt::format("{}: a data: URL without \";base64,\"; send "
                                 "data:image/png;base64,...",
                                 name),
                     "messages");
    }
    return decode_base64(url.substr(comma + 1), name);
  }
  if (scheme == "file") return read_file(url, name, most);
  throw ApiError(400, "invalid_image",
                 fmt::format("{}: the URL begins with \"{}\", and this server opens no connection; "
                             "send a data: URL",
                             name, printable(url.substr(0, 12))),
                 "messages");
}

std::vector<std::byte> MediaReader::read_file(std::string_view url, const std::string& name,
                                              size_t most) const {
  if (descriptor_ < 0) {
    throw ApiError(400, "invalid_image",
                   fmt::format("{}: file: URLs are not allowed here; send a data: URL, or start "
                               "the server with --media-root",
                               name),
                   "messages");
  }
  std::string_view path = url.substr(std::strlen("file:"));
  if (path.starts_with("//")) path.remove_prefix(2);
  if (path.starts_with("localhost/")) path.remove_prefix(std::strlen("localhost"));
  for (const std::string& absolute : {std::string(path), percent_decoded(path)}) {
    const std::string below = root_ == "/" ? "/" : root_ + '/';
    const bool is_relative = !absolute.starts_with('/');
    if (!is_relative && !absolute.starts_with(below)) continue;
    if (absolute.empty() || absolute.find('\0') != std::string::npos) continue;
    open_how how{};
    how.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
    const std::string relative = is_relative ? absolute : absolute.substr(below.size());
    const auto descriptor =
        static_cast<int>(syscall(SYS_openat2, descriptor_, relative.c_str(), &how, sizeof(how)));
    if (descriptor < 0) continue;
    const std::unique_ptr<const int, void (*)(const int*)> closing(
        &descriptor, [](const int* open) { close(*open); });
    struct stat status {};
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) continue;
    if (static_cast<size_t>(status.st_size) > most) {
      throw ApiError(
          413, "image_too_large",
          fmt::format("{} has {}; at most {} are read", name,
                      human_bytes(static_cast<size_t>(status.st_size)), human_bytes(most)),
          "messages");
    }
    std::vector<std::byte> bytes(static_cast<size_t>(status.st_size));
    read_all(descriptor, bytes.data(), bytes.size());
    return bytes;
  }
  throw ApiError(
      404, "media_not_found",
      fmt::format("{}: there is no such file in the server's media root; send its path there, "
                  "or file:///... with the whole path",
                  name),
      "messages");
}

}  // namespace kvlm
