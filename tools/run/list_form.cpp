#include "tools/run/list_form.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "tools/run/image_files.h"
#include "vision/frame_folder.h"
#include "vision/image.h"

// Looks at a file of records as a whole, so that one of another kind is refused once, with the way
// to convert it, and not line by line.
namespace kvlm {

namespace {

using namespace std::string_view_literals;

constexpr std::string_view kBlanks = " \t\n";
constexpr const char* kWrite = "write a JSON line a record, such as";

[[noreturn]] void refuse(const std::string& flag, const std::string& defect) {
  throw Error(ErrorCode::kCorruptFile, fmt::format("{} {}", flag, defect));
}

/// A binary file that is known by its first bytes, and its cure.
struct Binary {
  std::string_view magic;
  size_t offset;
  const char* kind;
  const char* cure;
};

constexpr const char* kExport = "export its images to files, and a JSON line a record, such as";
constexpr std::array kBinaries = {
    Binary{"PAR1"sv, 0, "a Parquet table", kExport},
    Binary{"ARROW1"sv, 0, "an Arrow table", kExport},
    Binary{"SQLite format 3"sv, 0, "an SQLite database", kExport},
    Binary{"\x93NUMPY"sv, 0, "a NumPy array", kExport},
    Binary{"\x89HDF\r\n"sv, 0, "an HDF5 file", kExport},
    Binary{"\x1f\x8b"sv, 0, "compressed by gzip", "give --batch - what gunzip -c prints of it:"},
    Binary{"BZh"sv, 0, "compressed by bzip2", "give --batch - what bunzip2 -c prints of it:"},
    Binary{"\xfd"
           "7zXZ\0"sv,
           0, "compressed by xz", "give --batch - what xz -dc prints of it:"},
    Binary{"\x28\xb5\x2f\xfd"sv, 0, "compressed by zstd",
           "give --batch - what zstd -dc prints of it:"},
    Binary{"PK\x03\x04"sv, 0, "a ZIP archive or a spreadsheet",
           "unpack it and give its folder, or a JSON line a record, such as"},
    Binary{"ustar"sv, 257, "a tar archive",
           "unpack it and give its folder, or a JSON line a record, such as"},
};

/// What is directly within a JSON object.
class Members {
 public:
  bool null() { return value(); }
  bool boolean(bool) { return value(); }
  bool number_integer(int64_t) { return value(); }
  bool number_unsigned(uint64_t) { return value(); }
  bool number_float(double, const std::string&) { return value(); }
  bool string(std::string&) { return value(); }
  bool binary(nlohmann::json::binary_t&) { return false; }
  bool start_object(size_t) {
    table_ = table_ || (depth_ == 2 && in_array_);
    nested_ = nested_ || (depth_ == 1 && keys_.back() != "meta");
    ++depth_;
    return value();
  }
  bool end_object() { return --depth_, true; }
  bool start_array(size_t) {
    if (depth_ == 1) in_array_ = true;
    ++depth_;
    return value();
  }
  bool end_array() {
    if (--depth_ == 1) in_array_ = false;
    return true;
  }
  bool key(std::string& name) {
    if (depth_ == 1) keys_.push_back(name);
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) {
    broken_ = true;
    return false;
  }

  /// No whole object.
  bool broken() const { return broken_; }
  bool has(std::string_view name) const { return std::ranges::find(keys_, name) != keys_.end(); }
  /// Whether it is no record of anyone, but holds many.
  bool is_data_set() const { return (table_ || nested_) && !has("id") && !has("custom_id"); }
  /// The first keys, for messages.
  std::string names() const {
    std::string text;
    for (size_t i = 0; i < std::min<size_t>(keys_.size(), 3); ++i) {
      text += (i == 0 ? "" : ", ") + printable(keys_[i]);
    }
    return text + (keys_.size() > 3 ? ", ..." : "");
  }

 private:
  /// False once so much is known that the rest cannot matter.
  bool value() { return ++values_ < kMostValues || !(table_ || nested_); }

  static constexpr size_t kMostValues = 1 << 20;
  std::vector<std::string> keys_;
  int depth_ = 0;
  size_t values_ = 0;
  bool in_array_ = false;
  bool table_ = false;   // a list of objects
  bool nested_ = false;  // an object
  bool broken_ = false;
};

Members members_of(std::string_view text) {
  Members members;
  nlohmann::json::sax_parse(text.begin(), text.end(), &members);
  return members;
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

/// Whether a line that is no whole object goes on in those that follow; else it is damaged.
bool goes_on(std::string_view line, std::string_view next) {
  const char last = line.back();
  return last == '{' || last == '[' || ((last == ',' || last == ':') && !next.starts_with('{'));
}

ListForm form_of_objects(std::string_view text, std::string_view first, const std::string& flag) {
  const bool one_line = first.size() == text.size();
  const Members line = members_of(first);
  if (!one_line && !(line.broken() && goes_on(first, trimmed(text.substr(first.size()))))) {
    return ListForm::kLines;
  }
  const Members object = one_line ? line : members_of(text);
  if (!object.broken() && object.is_data_set()) {
    refuse(flag, fmt::format("is one JSON object with the keys {}, not a list of records; {} {}",
                             object.names(), kWrite, kRecordExample));
  }
  if (one_line) return ListForm::kLines;
  if (!object.broken()) return ListForm::kObject;
  refuse(flag, fmt::format("has objects that span several lines or are cut; write each on a line "
                           "of its own, for example with jq -c ., such as {}",
                           kRecordExample));
}

/// Whether the lines have one separator, equally often.
bool is_table(std::span<const std::string_view> lines) {
  return std::ranges::any_of(std::string_view(",;\t|"), [&](char separator) {
    const auto count = std::ranges::count(lines[0], separator);
    return count > 0 && std::ranges::all_of(lines, [&](std::string_view line) {
             return std::ranges::count(line, separator) == count;
           });
  });
}

bool is_name(std::string_view line) {
  std::error_code unknown;
  return has_picture_suffix(line) || has_video_suffix(line) ||
         (line.size() < 4096 && std::filesystem::is_regular_file(line, unknown));
}

}  // namespace

void require_text(std::string_view bytes, const std::string& flag, const std::string& name) {
  const size_t start = bytes.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos || bytes[start] == '{') return;
  for (const Binary& binary : kBinaries) {
    if (bytes.size() < binary.offset || !bytes.substr(binary.offset).starts_with(binary.magic)) {
      continue;
    }
    refuse(flag, fmt::format("is {}, not a list of records; {} {}", binary.kind, binary.cure,
                             kRecordExample));
  }
  bool image = has_picture_suffix(name) || begins_like_image(bytes);
  try {
    probe_image(std::as_bytes(std::span(bytes)), name);
    image = true;
  } catch (const Error& error) {
    if (std::string_view(error.what()).find(" is a video ") != std::string_view::npos) {
      refuse(flag, fmt::format("is a video, not a list of records; give --video {}, or for many a "
                               "file with one path a line",
                               printable(name)));
    }
    image = image || error.code() == ErrorCode::kUnsupported;
  }
  if (!image) return;
  refuse(flag, fmt::format("is an image, not a file of records; give --image {}, or for many a "
                           "folder or a quoted pattern such as 'images/*.png'",
                           printable(name)));
}

ListForm form_of_list(std::string_view text, const std::string& flag, const std::string& name) {
  text = trimmed(text);
  if (text.empty()) return ListForm::kLines;
  const std::string_view first = trimmed(text.substr(0, text.find('\n')));
  if (text[0] == '{') return form_of_objects(text, first, flag);
  if (text[0] == '[') return ListForm::kArray;
  constexpr size_t kLooked = 100;
  std::vector<std::string_view> lines;  // the first ones
  size_t count = 0;
  size_t objects = 0;
  size_t names = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = trimmed(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.empty()) continue;
    ++count;
    objects += line[0] == '{' ? 1 : 0;
    if (lines.size() == kLooked) continue;
    lines.push_back(line);
    names += is_name(line) ? 1 : 0;
  }
  if (2 * objects >= count) return ListForm::kLines;
  if (first.find("://") != std::string_view::npos && !first.starts_with("file://")) {
    refuse(flag,
           fmt::format("lists addresses such as \"{:.60}\", and nothing is downloaded; download "
                       "the files and list their paths",
                       printable(first)));
  }
  const std::string suffix = std::filesystem::path(name).extension().string();
  const bool table = suffix == ".csv" || suffix == ".tsv" ||
                     (!std::filesystem::exists(std::filesystem::path(name).parent_path() / first) &&
                      is_table(lines));
  if (table) {
    refuse(flag,
           fmt::format("is a table, whose first line is \"{:.60}\", not a list of records; {} "
                       "{}",
                       printable(first), kWrite, kRecordExample));
  }
  if (2 * names >= lines.size()) return ListForm::kNames;
  refuse(flag,
         fmt::format("is no list of records: its first line is \"{:.60}\"; {} {}, or the path "
                     "of an image",
                     printable(first), kWrite, kRecordExample));
}

}  // namespace kvlm
