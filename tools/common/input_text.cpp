#include "tools/common/input_text.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "tools/common/program.h"

namespace kvlm {

namespace {

class Descriptor {
 public:
  explicit Descriptor(const std::string& path)
      : owned_(path != kStandardInput),
        number_(owned_ ? open(path.c_str(), O_RDONLY | O_CLOEXEC) : STDIN_FILENO) {}
  ~Descriptor() {
    if (owned_ && number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const noexcept { return number_; }

 private:
  bool owned_;
  int number_;
};

}  // namespace

std::string read_input(const std::string& path, size_t limit, const std::string& flag,
                       const std::string& expected) {
  const auto refuse = [&](const std::string& defect) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} {}; give {}", printable(flag), defect, expected));
  };
  const auto refuse_size = [&] { refuse(fmt::format("has more than {} bytes", limit)); };
  const Descriptor file(path);
  struct stat status {};
  if (file.get() < 0 || fstat(file.get(), &status) != 0) {
    refuse(fmt::format("cannot be read: {}", std::strerror(errno)));
  }
  if (S_ISDIR(status.st_mode)) refuse("is a directory");
  if (S_ISREG(status.st_mode) && static_cast<size_t>(status.st_size) > limit) refuse_size();
  std::string text;
  size_t filled = 0;
  for (;;) {
    if (filled == text.size()) {
      text.resize(std::min(std::max(size_t{1} << 16, filled * 2), limit + 1));
    }
    const ssize_t count = read(file.get(), text.data() + filled, text.size() - filled);
    if (count < 0 && errno == EINTR) {
      if (interrupted()) throw Error(ErrorCode::kCancelled, "interrupted");
      continue;
    }
    if (count < 0) refuse(fmt::format("cannot be read: {}", std::strerror(errno)));
    if (count == 0) break;
    filled += static_cast<size_t>(count);
    if (filled > limit) refuse_size();
  }
  text.resize(filled);
  return text;
}

}  // namespace kvlm
