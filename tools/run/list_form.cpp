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
constexpr size_t kNowhere = std::string_view::npos;
constexpr size_t kLooked = 100;  // the first lines
constexpr const char* kWrite = "write a JSON line a record, such as";

[[noreturn]] void refuse(const std::string& flag, const std::string& defect) {
  throw Error(ErrorCode::kCorruptFile, fmt::format("{} {}", flag, defect));
}

/// First bytes of a binary file.
struct Signature {
  std::string_view magic;
  BinaryFile file;
  size_t offset = 0;
};

using Kind = BinaryFile::Kind;
constexpr std::array kSignatures = {
    Signature{"PAR1"sv, {Kind::kTable, "a Parquet table", {}}},
    Signature{"ARROW1"sv, {Kind::kTable, "an Arrow table", {}}},
    Signature{"SQLite format 3"sv, {Kind::kTable, "an SQLite database", {}}},
    Signature{"\x93NUMPY"sv, {Kind::kTable, "a NumPy array", {}}},
    Signature{"\x89HDF\r\n"sv, {Kind::kTable, "an HDF5 file", {}}},
    Signature{"\x1f\x8b"sv, {Kind::kCompressed, "compressed by gzip", "gunzip -c"}},
    Signature{"BZh"sv, {Kind::kCompressed, "compressed by bzip2", "bunzip2 -c"}},
    Signature{"\xfd"
              "7zXZ\0"sv,
              {Kind::kCompressed, "compressed by xz", "xz -dc"}},
    Signature{"\x28\xb5\x2f\xfd"sv, {Kind::kCompressed, "compressed by zstd", "zstd -dc"}},
    Signature{"PK\x03\x04"sv, {Kind::kArchive, "a ZIP archive or a spreadsheet", {}}},
    Signature{"ustar"sv, {Kind::kArchive, "a tar archive", {}}, 257},
};

/// What is directly within a JSON object.
class Members {
 public:
  bool null() { return value(); }
  bool boolean(bool) { return value(); }
  bool number_integer(int64_t) { return value(); }
  bool number_unsigned(uint64_t) { return value(); }
  bool number_float(double, const std::string&) { return value(); }
  bool string(std::string& text) {
    if (depth_ == 1 && names_file(text)) ++file_values_;
    return value();
  }
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
    if (depth_ != 1) return true;
    keys_.push_back(name);
    if (names_file(name) || name.find_first_not_of("0123456789") == std::string::npos) ++id_keys_;
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
  bool is_data_set() const {
    if (has("id") || has("custom_id")) return false;
    const bool files = file_values_ > 1 && !has("image") && !has("video");
    return table_ || nested_ ||
           (!keys_.empty() &&
            (id_keys_ == keys_.size() || (files && file_values_ == keys_.size())));
  }
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

  static bool names_file(const std::string& text) {
    return has_picture_suffix(text) || has_video_suffix(text);
  }

  static constexpr size_t kMostValues = 1 << 20;
  std::vector<std::string> keys_;
  size_t id_keys_ = 0;      // numbers and file names
  size_t file_values_ = 0;  // file names
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

/// A record as another program writes it, and the way to JSON.
struct ForeignRecord {
  const char* written;
  const char* cure;
};

const ForeignRecord* foreign_record(std::string_view line) {
  static constexpr ForeignRecord kComma{"a comma at the end of each record",
                                        "remove it with sed 's/,$//', which leaves lines"};
  static constexpr ForeignRecord kPython{"keys in single quotes, as Python prints a dict",
                                         "write each with json.dumps(),"};
  static constexpr ForeignRecord kBareKeys{"keys without quotes", "write each as JSON,"};
  if (!line.starts_with('{')) return nullptr;
  if (line.ends_with(',') && !members_of(line.substr(0, line.size() - 1)).broken()) return &kComma;
  if (!members_of(line).broken()) return nullptr;
  const std::string_view key = trimmed(line.substr(1));
  if (key.starts_with('\'')) return &kPython;
  const char letter = key.empty() ? '\0' : key[0];
  const bool bare =
      letter == '_' || (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z');
  return bare ? &kBareKeys : nullptr;
}

ListForm form_of_objects(std::string_view text, std::string_view first, const std::string& flag) {
  require_json_lines(text, flag);
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

/// Whether a line is a file's name; one with blanks only if the file is there: what follows a
/// number, a key or a mark of a list may look like a name, too.
bool is_name(std::string_view line, const std::filesystem::path& folder) {
  std::error_code unknown;
  const bool named = has_picture_suffix(line) || has_video_suffix(line);
  if (named && line.find_first_of(kBlanks) == std::string_view::npos) return true;
  return line.size() < 4096 && line.find('\0') == std::string_view::npos &&
         (std::filesystem::is_regular_file(folder / line, unknown) ||
          std::filesystem::is_regular_file(line, unknown));
}

/// Calls `visit` with each line that is not blank, until it returns false.
template <class Visit>
void for_each_line(std::string_view text, const Visit& visit) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = trimmed(record_text(text.substr(0, end)));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!line.empty() && !visit(line)) return;
  }
}

}  // namespace

std::optional<BinaryFile> binary_file(std::string_view bytes, const std::string& name) {
  const size_t start = bytes.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos || bytes[start] == '{') return std::nullopt;
  for (const Signature& signature : kSignatures) {
    if (bytes.size() >= signature.offset &&
        bytes.substr(signature.offset).starts_with(signature.magic)) {
      return signature.file;
    }
  }
  bool image = has_picture_suffix(name) || begins_like_image(bytes);
  try {
    probe_image(std::as_bytes(std::span(bytes)), name);
    image = true;
  } catch (const Error& error) {
    if (std::string_view(error.what()).find(" is a video ") != std::string_view::npos) {
      return BinaryFile{Kind::kVideo, "a video", {}};
    }
    image = image || error.code() == ErrorCode::kUnsupported;
  }
  return image ? std::optional(BinaryFile{Kind::kImage, "an image", {}}) : std::nullopt;
}

void require_text(std::string_view bytes, const std::string& flag, const std::string& name) {
  const std::optional<BinaryFile> file = binary_file(bytes, name);
  if (!file) return;
  const bool folders = flag.starts_with("--batch");
  const std::string shown = printable(name);
  const std::string line = fmt::format("{} {}", kWrite, kRecordExample);
  std::string cure = line;
  switch (file->kind) {
    case Kind::kImage:
      if (folders) {
        cure = fmt::format(
            "give --image {}, or for many a folder or a quoted pattern such as "
            "'images/*.png'",
            shown);
      }
      break;
    case Kind::kVideo:
      if (folders) {
        cure = fmt::format("give --video {}, or for many a file with one path a line", shown);
      }
      break;
    case Kind::kCompressed:
      cure = fmt::format("give {} - what {} prints of it", flag.substr(0, flag.find(' ')),
                         file->reader);
      break;
    case Kind::kArchive:
      cure = (folders ? "unpack it and give its folder, or " : "unpack it and ") + line;
      break;
    case Kind::kTable:
      cure = "export its images to files, and " + line;
      break;
  }
  refuse(flag, fmt::format("is {}, not a list of records; {}", file->what, cure));
}

std::string_view record_text(std::string_view text) {
  constexpr std::string_view kMark = "\xef\xbb\xbf";
  for (;;) {
    if (text.starts_with(kMark)) {
      text.remove_prefix(kMark.size());
    } else if (!text.empty() && std::string_view(" \t\r\n\x1e").find(text[0]) != kNowhere) {
      text.remove_prefix(1);
    } else {
      return text;
    }
  }
}

void require_json_lines(std::string_view text, const std::string& flag) {
  const ForeignRecord* form = nullptr;  // of the first line
  size_t count = 0;
  size_t foreign = 0;
  for_each_line(text, [&](std::string_view line) {
    const ForeignRecord* found = foreign_record(line);
    if (count == 0) form = found;
    foreign += found != nullptr ? 1 : 0;
    return ++count < kLooked && form != nullptr;
  });
  if (form == nullptr || count == 1 || 2 * foreign < count) return;  // one: its error is enough
  refuse(flag, fmt::format("has {}; {} such as {}", form->written, form->cure, kRecordExample));
}

ListForm form_of_list(std::string_view text, const std::string& flag, const std::string& name) {
  text = trimmed(record_text(text));
  if (text.empty()) return ListForm::kLines;
  const std::string_view first = trimmed(text.substr(0, text.find('\n')));
  if (text[0] == '{') return form_of_objects(text, first, flag);
  if (text[0] == '[') return ListForm::kArray;
  const std::filesystem::path folder = std::filesystem::path(name).parent_path();
  if (const size_t end = first.find('\0');
      end != kNowhere && is_name(first.substr(0, end), folder)) {
    refuse(flag,
           "has NUL bytes between names, as find -print0 writes; write a line for each, for "
           "example with tr '\\0' '\\n'");
  }
  std::vector<std::string_view> lines;  // the first ones
  size_t count = 0;
  size_t objects = 0;
  size_t names = 0;
  for_each_line(text, [&](std::string_view line) {
    ++count;
    objects += line[0] == '{' ? 1 : 0;
    if (lines.size() == kLooked) return true;
    lines.push_back(line);
    names += is_name(line, folder) ? 1 : 0;
    return true;
  });
  if (2 * objects >= count) return ListForm::kLines;
  if (first.find("://") != std::string_view::npos && !first.starts_with("file://")) {
    refuse(flag,
           fmt::format("lists addresses such as \"{:.60}\", and nothing is downloaded; download "
                       "the files and list their paths",
                       printable(first)));
  }
  const std::string suffix = std::filesystem::path(name).extension().string();
  const bool table = suffix == ".csv" || suffix == ".tsv" ||
                     (!std::filesystem::exists(folder / first) && is_table(lines));
  if (table) {
    refuse(flag,
           fmt::format("is a table, whose first line is \"{:.60}\", not a list of records; {} "
                       "{}",
                       printable(first), kWrite, kRecordExample));
  }
  if (2 * names >= lines.size()) return ListForm::kNames;
  refuse(flag,
         fmt::format("is no list of records: its first line is \"{:.60}\"; {} {}, or the path "
                     "of an image that is there",
                     printable(first), kWrite, kRecordExample));
}

}  // namespace kvlm
