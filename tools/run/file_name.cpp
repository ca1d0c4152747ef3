#include "tools/run/file_name.h"

#include <fmt/format.h>

#include <charconv>

#include "kernels/base/printable.h"
#include "tools/common/input_text.h"

namespace kvlm {

namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

/// Replaces %41 by A; a % that is not followed by two hex digits stays.
std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    int code = 0;
    const char* digits = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(digits, digits + 2, code, 16).ptr == digits + 2) {
      out += static_cast<char>(code);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

void refuse_name(ErrorCode code, std::string_view kind, const std::string& name,
                 std::string_view found) {
  throw Error(code, fmt::format("{} {} {}", kind, printable(name), found));
}

std::string path_of_name(const std::string& name, std::string_view kind) {
  std::string path = name;
  const std::string start = lower(name.substr(0, 8));
  if (start.starts_with("http:") || start.starts_with("https:") || start.starts_with("ftp:")) {
    refuse_name(ErrorCode::kUnsupported, kind, name,
                "is a URL, and nothing is downloaded; download it and give the file");
  }
  if (start.starts_with("data:")) {
    refuse_name(ErrorCode::kUnsupported, kind, name,
                "is a data URI, which is not supported; write it to a file and give that");
  }
  if (start.starts_with("file:///")) path = percent_decoded(name.substr(7));
  if (path.empty() || path.find('\0') != std::string::npos) {
    refuse_name(ErrorCode::kInvalidArgument, kind, name.empty() ? "\"\"" : name,
                "is not a file name; give its path");
  }
  return path;
}

std::string path_of_file_name(const std::string& name, std::string_view kind) {
  return name == kStandardInput ? "./-" : path_of_name(name, kind);
}

}  // namespace kvlm
