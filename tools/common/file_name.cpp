#include "tools/common/file_name.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <system_error>

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

constexpr size_t kLongestScheme = 24;

/// Whether a name begins with a scheme and "//", such as s3://, or with http: and its like.
bool is_address(std::string_view name) {
  const size_t colon = name.find(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::string_view scheme = name.substr(0, colon);
  if (scheme == "http" || scheme == "https" || scheme == "ftp") return true;
  return name.substr(colon).starts_with("://") && std::ranges::all_of(scheme, [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '+' || c == '-';
         });
}

/// Whether a name is the beginning of an image in base64, or so long a word that it may be one.
bool is_base64(std::string_view name) {
  constexpr std::string_view kLetters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\r\n";
  constexpr std::string_view kStarts[] = {"/9j/", "iVBORw0KGgo", "R0lGODdh", "R0lGODlh", "UklGR"};
  constexpr size_t kShort = 64;
  constexpr size_t kLongestName = 255;
  if (name.size() < kShort || name.find_first_not_of(kLetters) != std::string_view::npos) {
    return false;
  }
  return name.size() > kLongestName || std::ranges::any_of(kStarts, [&](std::string_view start) {
           return name.starts_with(start);
         });
}

}  // namespace

std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned code = 0;  // of a signed number "-1" would be two digits
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

void refuse_name(ErrorCode code, std::string_view kind, const std::string& name,
                 std::string_view found) {
  throw Error(code, fmt::format("{} {} {}", kind, printable(name), found));
}

std::string path_of_name(const std::string& name, std::string_view kind) {
  std::string path = name;
  const std::string start = lower(name.substr(0, kLongestScheme));
  const bool file = start.starts_with("file://");
  if (is_address(start) && !file) {
    refuse_name(ErrorCode::kUnsupported, kind, name,
                "is a URL, and nothing is downloaded; download it and give the file");
  }
  if (start.starts_with("data:")) {
    refuse_name(ErrorCode::kUnsupported, kind, name,
                "is a data URI, which is not supported; write it to a file and give that");
  }
  if (file) {
    const std::string_view host = "localhost";
    path = name.substr(std::string_view("file://").size());
    if (lower(path).starts_with(host)) path.erase(0, host.size());
    if (!path.starts_with('/')) {
      refuse_name(ErrorCode::kUnsupported, kind, name,
                  "names another machine; write file:///, or the path alone");
    }
    path = percent_decoded(path);
  }
  if (path.empty() || path.find('\0') != std::string::npos) {
    refuse_name(ErrorCode::kInvalidArgument, kind, name.empty() ? "\"\"" : name,
                "is not a file name; give its path");
  }
  return path;
}

std::string oddity_of_name(const std::string& name) {
  if (is_base64(name))
    return "is base64 text, not a file name; write it to a file and give its path";
  if (std::ranges::any_of(name, [](char c) { return static_cast<unsigned char>(c) < 0x20; })) {
    return "has a control character, as \\b and \\t of a Windows path become in JSON; write / "
           "between folders";
  }
  if (name.starts_with("~/")) {
    return "begins with ~, which only a shell replaces; write the whole path of the home folder";
  }
  if (name.find('\\') != std::string::npos) {
    return "has backslashes, as Windows separates folders; write / between them";
  }
  if (name.starts_with(' ') || name.ends_with(' ')) {
    return "begins or ends with a blank; remove it";
  }
  return {};
}

std::string path_in(const std::filesystem::path& folder, const std::string& name,
                    std::string_view kind) {
  std::string path = (folder / path_of_file_name(name, kind)).string();
  const std::string oddity = oddity_of_name(name);
  std::error_code unknown;
  if (!oddity.empty() && !std::filesystem::exists(path, unknown)) {
    refuse_name(ErrorCode::kInvalidArgument, kind, name, oddity);
  }
  return path;
}

std::string path_of_file_name(const std::string& name, std::string_view kind) {
  return name == kStandardInput ? "./-" : path_of_name(name, kind);
}

}  // namespace kvlm
