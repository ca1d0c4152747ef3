#pragma once

#include <cstdint>
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
  size_t line = 0;            ///< in the file, from 1; of an array or a list of files its number
  bool listed = false;        ///< a file of a folder, a pattern or a list, not an object of JSON
  nlohmann::ordered_json id;  ///< a string or an integer; null if the line has none
  std::vector<std::string> images;
  std::vector<std::string> videos;
  std::string prompt;
  std::string text;             ///< only kForce: what the model is made to say
  nlohmann::ordered_json meta;  ///< any value, which the answer repeats; null if there is none
  std::string error;
};

/// Who reads records: vlm-run --batch, where each needs an id, or vlm-kv --data, where each may
/// have a text.
enum class RecordUse : uint8_t { kAnswer, kForce };

/// What a record asks for by itself, as its answer carries it: {"images": [absolute paths],
/// "videos": [likewise], "prompt": text}, each only if it has some. With `content`, and if all
/// files can be read, also {"content": [content_hash() of images, then of videos]}.
nlohmann::ordered_json asked_of(const Record& record, bool content = true);

/// "about a.png, and this start asks about b.png", if an answer to what was asked `earlier` is none
/// to what is asked `now`; nothing is known of an empty object. Files with other paths are the same
/// if their content is.
std::optional<std::string> difference_of_asked(const nlohmann::ordered_json& earlier,
                                               const nlohmann::ordered_json& now);

/// Reads records one after the other. A relative image or video is relative to `folder`. What is no
/// record, or has the id of an earlier one, is a record with an error.
class RecordLines {
 public:
  explicit RecordLines(std::filesystem::path folder, RecordUse use = RecordUse::kAnswer)
      : folder_(std::move(folder)), use_(use) {}

  /// The next line, a JSON object, without its end; nothing for a blank one.
  std::optional<Record> parse(std::string_view line);
  /// The next element of an array: an object, or the name of a file.
  Record read(const nlohmann::json& element);
  /// The next name in a list of files, which is its id. Relative to `folder`, or if it is not there
  /// to the current folder.
  Record read_name(const std::string& name);

 private:
  void require_new_id(Record& record, const char* noun);

  std::filesystem::path folder_;
  RecordUse use_;
  size_t number_ = 0;                    // of lines so far
  std::map<std::string, size_t> ids_{};  // where each was first
};

/// The records of a text, one JSON object a line; blank lines are none.
std::vector<Record> parse_records(std::string_view text, const std::filesystem::path& folder,
                                  RecordUse use = RecordUse::kAnswer);

/// The records of a whole file, or of standard input ("-"), in any encoding of TextDecoder: JSON
/// Lines, a JSON array of records or of file names, one record over several lines, or names of
/// images and videos, one a line. Throws Error{kCorruptFile}, naming --batch or --data `name`, for
/// what is none of these: an image, a table, a data set in one JSON object, an archive, prose.
std::vector<Record> parse_list(std::string_view bytes, const std::string& name,
                               const std::filesystem::path& folder,
                               RecordUse use = RecordUse::kAnswer);

/// One record for each of these files; its id is the path below `folder`.
std::vector<Record> picture_records(const std::vector<std::string>& paths,
                                    const std::filesystem::path& folder);

/// What --batch names, in order: the records of a file or of standard input ("-"), the images of a
/// folder, or the files that a pattern with *, **, ? or [] matches, sorted by name, without
/// is_shard_file() of `output`. `left_out`, if it is given, becomes a sentence on what a folder has
/// besides, or empty. Throws Error{kCorruptFile} if it cannot be read, is no list, or has none.
std::vector<Record> read_records(const std::string& batch, const std::string& output,
                                 std::string* left_out = nullptr);

}  // namespace kvlm
