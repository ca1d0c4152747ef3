#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// One request of a batch, read but not judged: what is wrong with it becomes its result.
struct Record {
  size_t line = 0;            ///< in the file, from 1; of a picture its place in the list
  bool listed = false;        ///< a picture of a folder or of a pattern, not a line of a file
  nlohmann::ordered_json id;  ///< a string or an integer; null if the line has none
  std::vector<std::string> images;
  std::vector<std::string> videos;
  std::string prompt;
  std::string error;
};

/// What a record asks for by itself, as its answer carries it: {"images": [absolute paths],
/// "videos": [likewise], "prompt": text}, each only if it has some.
nlohmann::ordered_json asked_of(const Record& record);

/// "about a.png, and this start asks about b.png", if an answer to what was asked `earlier` is none
/// to what is asked `now`; nothing is known of an empty object.
std::optional<std::string> difference_of_asked(const nlohmann::ordered_json& earlier,
                                               const nlohmann::ordered_json& now);

/// Reads the lines of a list of records, one JSON object a line. A relative image or video is
/// relative to `folder`. A line that is no record, or has the id of an earlier one, is a record
/// with an error.
class RecordLines {
 public:
  explicit RecordLines(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// The next line, without its end; nothing for a blank one.
  std::optional<Record> parse(std::string_view line);

 private:
  std::filesystem::path folder_;
  size_t number_ = 0;                    // of lines so far
  std::map<std::string, size_t> ids_{};  // where each was first
};

/// The records of a text, one JSON object a line; blank lines are none. A relative picture or
/// video is relative to `folder`. A line that is no record, or has the id of an earlier one, is a
/// record with an error.
std::vector<Record> parse_records(std::string_view text, const std::filesystem::path& folder);

/// parse_records() of a whole list, from a file or from standard input ("-"). Throws
/// Error{kCorruptFile}, naming --batch `name`, for a text that is no list of records.
std::vector<Record> parse_list(std::string_view text, const std::string& name,
                               const std::filesystem::path& folder);

/// One record for each of these files; its id is the path below `folder`.
std::vector<Record> picture_records(const std::vector<std::string>& paths,
                                    const std::filesystem::path& folder);

/// What --batch names, in order: the records of a file or of standard input ("-"), the pictures of
/// a folder, or those that a pattern with *, ? or [] matches, sorted by name, without hidden ones
/// and is_shard_file() of `output`. Throws Error{kCorruptFile} if it cannot be read, is a picture
/// itself, or has none.
std::vector<Record> read_records(const std::string& batch, const std::string& output);

}  // namespace kvlm
