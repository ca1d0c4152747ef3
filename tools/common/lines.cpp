#include "tools/common/lines.h"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <system_error>

#include "kernels/base/error.h"

namespace kvlm {

void for_each_line(const std::string& path, std::string_view name,
                   const std::function<bool(int number, std::string_view line)>& body) {
  const auto unreadable = [&] {
    return Error(ErrorCode::kCorruptFile,
                 fmt::format("{} cannot be read: {}; give a file with one JSON record a line", name,
                             std::generic_category().message(errno)));
  };
  const auto close = [](std::FILE* file) { static_cast<void>(std::fclose(file)); };
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "rbe"), close);
  if (file == nullptr) throw unreadable();
  std::array<char, 1 << 16> chunk{};
  std::string line;
  int number = 1;
  const auto finish = [&] {
    if (line.ends_with('\r')) line.pop_back();
    const bool more = body(number++, line);
    line.clear();
    return more;
  };
  while (const size_t got = std::fread(chunk.data(), 1, chunk.size(), file.get())) {
    for (std::string_view rest(chunk.data(), got); !rest.empty();) {
      const size_t end = rest.find('\n');
      line += rest.substr(0, end);
      if (line.size() > kMaxLineBytes) {
        throw Error(ErrorCode::kCorruptFile,
                    fmt::format("{} line {} is longer than {} bytes; give a file with one JSON "
                                "record a line",
                                name, number, kMaxLineBytes));
      }
      if (end == std::string_view::npos) break;
      if (!finish()) return;
      rest.remove_prefix(end + 1);
    }
  }
  if (std::ferror(file.get()) != 0) throw unreadable();
  if (!line.empty()) static_cast<void>(finish());
}

}  // namespace kvlm
