#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// One request of a batch, read but not judged: what is wrong with it becomes its result.
struct Record {
  size_t line = 0;            ///< in the file, from 1; of a picture its place in the list
  nlohmann::ordered_json id;  ///< a string or an integer; null if the line has none
  std::vector<std::string> images;
  std::string prompt;
  std::string error;
};

/// The records of a text, one JSON object a line; blank lines are none. A relative picture is
/// relative to `folder`. A line that is no record, or has the id of an earlier one, is a record
/// with an error.
std::vector<Record> parse_records(std::string_view text, const std::filesystem::path& folder);

/// One record for each of these files; its id is the path below `folder`.
std::vector<Record> picture_records(const std::vector<std::string>& paths,
                                    const std::filesystem::path& folder);

/// What --batch names, in order: the records of a file or of standard input ("-"), the pictures of
/// a folder, or those that a pattern with *, ? or [] matches, sorted by name and without
/// `output`. Throws Error{kCorruptFile} if it cannot be read or has no picture.
std::vector<Record> read_records(const std::string& batch, const std::string& output);

}  // namespace kvlm
