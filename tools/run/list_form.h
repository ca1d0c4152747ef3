#pragma once

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

/// Throws Error{kCorruptFile} that starts with `flag` ("--batch a.png"), once for the whole file,
/// if the bytes are an image, a video, an archive or a table in binary. `name` is the file's.
void require_text(std::string_view bytes, const std::string& flag, const std::string& name);

/// The form of a text in UTF-8. Throws likewise if it is a table (CSV, TSV), a JSON object that is
/// no record, objects that span lines, or anything else.
ListForm form_of_list(std::string_view text, const std::string& flag, const std::string& name);

}  // namespace kvlm
