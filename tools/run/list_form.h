#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvlm {

/// How a file lists records.
enum class ListForm {
  kLines,   ///< a JSON object a line; some may be damaged
  kArray,   ///< a JSON array
  kObject,  ///< one JSON object over several lines
  kNames,   ///< a name of an image or video a line
};

/// How a record is written, for messages.
inline constexpr const char* kRecordExample =
    R"({"id": 1, "image": "a.png", "prompt": "What is this?"})";

/// A file that is no text.
struct BinaryFile {
  enum class Kind { kImage, kVideo, kCompressed, kArchive, kTable };
  Kind kind;
  std::string_view what;    // "an image", "compressed by gzip"
  std::string_view reader;  // of kCompressed: the command that prints the content
};

/// What a file is by its first bytes and its name; nothing for what may be text.
std::optional<BinaryFile> binary_file(std::string_view bytes, const std::string& name);

/// Throws Error{kCorruptFile} that starts with `flag` ("--batch a.png"), once for the whole file,
/// if it is a binary_file(). `name` is the file's. Of the flags --batch alone reads folders.
void require_text(std::string_view bytes, const std::string& flag, const std::string& name);

/// `text` without what may precede a record: blanks, a byte order mark where files were joined, and
/// the separator of RFC 7464.
std::string_view record_text(std::string_view text);

/// Throws likewise if the first of several lines, and half of all, are records as other programs
/// write them: with a comma at the end, in Python's quotes, or with keys without quotes.
void require_json_lines(std::string_view text, const std::string& flag);

/// The form of a text in UTF-8. Throws likewise if it is a table (CSV, TSV), a JSON object that is
/// no record, objects that span lines, or anything else.
ListForm form_of_list(std::string_view text, const std::string& flag, const std::string& name);

}  // namespace kvlm
