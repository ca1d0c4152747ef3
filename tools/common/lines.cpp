#include "tools/common/lines.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "kernels/base/error.h"
#include "tools/common/program.h"

namespace kvlm {

TextLines::TextLines(int descriptor, const std::string& name)
    : descriptor_(descriptor), name_(name), decoder_(name) {}

bool TextLines::next(std::string& line) {
  for (;;) {
    const size_t end = text_.find('\n', std::max(begin_, looked_));
    const size_t length = std::min(end, text_.size()) - begin_;
    if (length > kMaxLineBytes) {
      throw Error(ErrorCode::kCorruptFile,
                  fmt::format("{} line {} is longer than {} bytes; give shorter lines", name_,
                              number_ + 1, kMaxLineBytes));
    }
    if (end != std::string::npos || (ended_ && length > 0)) {
      line = text_.substr(begin_, length);
      begin_ = std::min(begin_ + length + 1, text_.size());
      require_utf8(line, name_, ++number_);
      return true;
    }
    if (ended_ || !read_more()) return false;
  }
}

bool TextLines::read_more() {
  text_.erase(0, std::exchange(begin_, 0));
  looked_ = text_.size();
  std::array<char, 1 << 16> chunk{};
  ssize_t count = 0;
  while ((count = read(descriptor_, chunk.data(), chunk.size())) < 0) {
    if (errno == EINTR && interrupted()) return false;
    if (errno == EINTR) continue;
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} cannot be read: {}; give a file or a pipe", name_,
                            std::generic_category().message(errno)));
  }
  text_ += decoder_.decode({chunk.data(), static_cast<size_t>(count)}, count == 0);
  ended_ = count == 0;
  return true;
}

}  // namespace kvlm
