#include "tools/run/records.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <system_error>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/words.h"
#include "runtime/loading/config.h"
#include "runtime/loading/plain_text.h"
#include "tools/common/file_name.h"
#include "tools/common/input_text.h"
#include "tools/run/file_identity.h"
#include "tools/run/image_files.h"
#include "tools/run/list_form.h"
#include "tools/run/pictures.h"
#include "tools/run/report.h"
#include "tools/run/shard.h"
#include "tools/run/videos.h"

// The requests of a batch, and the records of vlm-kv: lines of JSON, arrays, lists of files,
// folders and patterns. What cannot be read becomes a record with an error, in its place; only a
// file that is no list at all is refused.
namespace kvlm {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr size_t kMaxBytes = size_t{1} << 29;
constexpr size_t kMaxLineBytes = size_t{1} << 26;
constexpr std::array<std::string_view, 8> kKeys = {"id",     "image",  "images", "video",
                                                   "videos", "prompt", "meta",   "text"};

/// A key of other programs, and what it is called here.
struct ForeignKey {
  std::string_view key;
  std::string_view ours;
};

constexpr ForeignKey kForeignKeys[] = {
    {"question", "prompt"},  {"query", "prompt"},     {"instruction", "prompt"},
    {"input", "prompt"},     {"messages", "prompt"},  {"conversations", "prompt"},
    {"file_name", "image"},  {"filename", "image"},   {"file", "image"},
    {"path", "image"},       {"img", "image"},        {"image_path", "image"},
    {"image_file", "image"}, {"image_url", "image"},  {"url", "image"},
    {"picture", "image"},    {"photo", "image"},      {"image_id", "id"},
    {"question_id", "id"},   {"questionid", "id"},    {"custom_id", "id"},
    {"uid", "id"},           {"key", "id"},           {"index", "id"},
    {"video_path", "video"}, {"video_file", "video"}, {"clip", "video"},
    {"caption", "text"},     {"captions", "text"},    {"answer", "text"},
    {"answers", "text"},     {"reference", "text"},   {"references", "text"},
    {"label", "text"},       {"target", "text"},      {"response", "text"},
};

[[noreturn]] void fail(const std::string& where, const std::string& defect,
                       const std::string& cure) {
  throw Error(ErrorCode::kCorruptFile, fmt::format("{}: {}; {}", where, defect, cure));
}

/// parse_json(), which speaks of files that are downloaded, with the advice for one's own.
nlohmann::json parse_own(std::string_view text, const std::string& where) {
  try {
    return parse_json(text, "no JSON");
  } catch (const Error& error) {
    const std::string message = error.what();
    fail(where, message.substr(0, message.rfind("; ")),
         fmt::format("write it like {}", kRecordExample));
  }
}

std::string lower_case(std::string word) {
  for (char& c : word) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return word;
}

/// The keys that such a record may have.
std::span<const std::string_view> keys_of(RecordUse use) {
  return std::span(kKeys).first(kKeys.size() - (use == RecordUse::kAnswer ? 1 : 0));
}

void require_known_keys(const nlohmann::json& json, RecordUse use, const std::string& where) {
  const std::span<const std::string_view> keys = keys_of(use);
  if (json.contains("custom_id") && json.contains("body")) {
    fail(where, "is a request of OpenAI's batch API, which is not read",
         fmt::format("write it like {}", kRecordExample));
  }
  for (const auto& [key, value] : json.items()) {
    if (std::ranges::find(keys, key) != keys.end()) continue;
    const std::string lower = lower_case(key);
    const auto foreign = std::ranges::find(kForeignKeys, lower, &ForeignKey::key);
    std::string_view ours = foreign == std::end(kForeignKeys) ? lower : foreign->ours;
    std::string hint;
    if (ours == "text" && use == RecordUse::kAnswer) {
      hint = ", which only vlm-kv --data reads, as \"text\"";
    } else if (foreign != std::end(kForeignKeys)) {
      hint = fmt::format(", which is \"{}\" here", ours);
    } else {
      ours = nearest_spelling(lower, {keys.begin(), keys.end()});
      if (!ours.empty()) hint = fmt::format("; did you mean \"{}\"?", ours);
    }
    fail(where, fmt::format("has the unknown key \"{}\"{}", printable(key), hint),
         fmt::format("the keys of a record are {}; columns of your own go into meta",
                     fmt::join(keys, ", ")));
  }
}

/// The names under `one` and in the list under `many`.
std::vector<std::string> read_names(const ConfigReader& reader, const char* one, const char* many) {
  std::vector<std::string> names;
  if (reader.raw(one).is_array()) {
    reader.fail(one, fmt::format("a file name; a list goes under {}", many));
  }
  if (reader.has(one)) names.push_back(reader.required_string(one));
  const nlohmann::json& list = reader.raw(many);
  if (!list.is_null() && !list.is_array()) {
    reader.fail(many, fmt::format("a list of file names; one name goes under {}", one));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_string()) {
      fail(reader.path(), fmt::format("{}[{}] is {}", many, i, json_line(list[i])),
           fmt::format("expected a list of file names in {}", many));
    }
    names.push_back(list[i].get<std::string>());
  }
  return names;
}

void read_object(Record& record, const nlohmann::json& json, RecordUse use, const fs::path& folder,
                 const std::string& where) {
  const ConfigReader reader(json, where);
  const nlohmann::json& id = reader.raw("id");
  const bool is_id = id.is_string() || id.is_number_integer();
  if (is_id) record.id = id;
  require_known_keys(json, use, where);
  if (!is_id && !(id.is_null() && use == RecordUse::kForce)) {
    reader.fail("id", "a string or an integer");
  }
  record.meta = reader.raw("meta");
  record.images = read_names(reader, "image", "images");
  for (std::string& image : record.images) image = path_in(folder, image, "image");
  record.videos = read_names(reader, "video", "videos");
  for (std::string& video : record.videos) video = path_in(folder, video, "video");
  record.prompt = reader.string("prompt", "");
  record.text = reader.string("text", "");
  if (reader.raw("text").is_string() && record.text.empty()) {
    reader.fail("text", "the answer to force, or no text");
  }
  if (record.images.empty() && record.videos.empty() && record.prompt.empty()) {
    reader.fail("image", "a file name, or images, a video, videos, or a prompt");
  }
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

/// Gives a record the name of its file as id, if that is UTF-8.
void set_name(Record& record, const std::string& name) {
  if (nlohmann::json::parse(json_line(name)) == name) {  // bytes that are not UTF-8 change
    record.id = name;
    return;
  }
  record.error = fmt::format(
      "image {} has a name that is not UTF-8, which cannot be an id; rename it, or name it in a "
      "record",
      printable(name));
}

std::string absolute_path(const std::string& path) {
  std::error_code unknown;
  const fs::path absolute = fs::absolute(path, unknown);
  return (unknown ? fs::path(path) : absolute).lexically_normal().string();
}

/// For messages: a path's end tells more than its beginning.
std::string end_of_path(const std::string& path) {
  constexpr size_t kLimit = 100;
  if (path.size() <= kLimit) return printable(path);
  size_t start = path.size() - kLimit;
  while (start < path.size() && (static_cast<unsigned char>(path[start]) & 0xc0u) == 0x80) ++start;
  return "..." + printable(path.substr(start));
}

/// Whether two files are one: by path, or, if the earlier path is another, by what was in it.
bool same_file(const std::string& before, const std::string& content, const std::string& now) {
  std::error_code unknown;
  if (before == now || fs::equivalent(before, now, unknown)) return true;
  const std::string known = content.empty() ? content_hash(before) : content;
  return !known.empty() && known == content_hash(now);
}

/// What difference_of_asked() says of files, each of which is a `noun`. `content` has the hashes of
/// the earlier ones, or none.
std::optional<std::string> difference_of_files(const Json& before, std::span<const Json> content,
                                               const Json& after, const char* noun) {
  size_t place = 0;
  while (place < before.size() && place < after.size() &&
         same_file(before[place].get<std::string>(),
                   content.empty() ? std::string() : content[place].get<std::string>(),
                   after[place].get<std::string>())) {
    ++place;
  }
  if (place == before.size() && place == after.size()) return std::nullopt;
  const auto name = [&](const Json& files) {
    return place == files.size()
               ? fmt::format("{} {}{}", files.size(), noun, files.size() == 1 ? "" : "s")
               : end_of_path(files[place].get<std::string>());
  };
  return fmt::format("about {}, but this run asks about {}", name(before), name(after));
}

}  // namespace

Json asked_of(const Record& record, bool content) {
  Json asked = Json::object();
  Json hashes = Json::array();
  for (const auto& [key, files] :
       {std::pair("images", &record.images), {"videos", &record.videos}}) {
    for (const std::string& file : *files) {
      asked[key].push_back(absolute_path(file));
      if (content) hashes.push_back(content_hash(file));
    }
  }
  if (!record.prompt.empty()) asked["prompt"] = record.prompt;
  if (!hashes.empty() && std::ranges::find(hashes, Json("")) == hashes.end()) {
    asked["content"] = std::move(hashes);
  }
  return Json::parse(json_line(asked));  // as it is read back
}

std::optional<std::string> difference_of_asked(const Json& earlier, const Json& now) {
  if (earlier.empty()) return std::nullopt;
  const Json none = Json::array();
  const Json images = earlier.value("images", none);
  const Json videos = earlier.value("videos", none);
  Json::array_t content = earlier.value("content", none).get<Json::array_t>();
  if (content.size() != images.size() + videos.size()) content.clear();
  const std::span<const Json> hashes = content;
  const auto of = [&](size_t first, size_t count) {
    return hashes.empty() ? hashes : hashes.subspan(first, count);
  };
  if (const auto differs =
          difference_of_files(images, of(0, images.size()), now.value("images", none), "image")) {
    return differs;
  }
  if (const auto differs = difference_of_files(videos, of(images.size(), videos.size()),
                                               now.value("videos", none), "video")) {
    return differs;
  }
  const auto prompt = [](const Json& asked) {
    return asked.contains("prompt")
               ? fmt::format("the prompt \"{}\"", printable(asked["prompt"].get<std::string>()))
               : std::string("no prompt of its own");
  };
  if (earlier.value("prompt", "") == now.value("prompt", "")) return std::nullopt;
  return fmt::format("with {}, but this run has {}", prompt(earlier), prompt(now));
}

void RecordLines::require_new_id(Record& record, const char* noun) {
  if (record.id.is_null()) return;
  const auto [first, inserted] = ids_.emplace(json_line(record.id), number_);
  if (inserted) return;
  record.error = fmt::format("{0} {1}: id {2} is also the id of {0} {3}; give each record its own",
                             noun, number_, printable(first->first), first->second);
  record.id = nullptr;
}

std::optional<Record> RecordLines::parse(std::string_view line) {
  ++number_;
  line = record_text(line);
  if (line.empty()) return std::nullopt;
  Record record;
  record.line = number_;
  const std::string where = fmt::format("line {}", number_);
  try {
    if (line.size() > kMaxLineBytes) {
      fail(where, fmt::format("has {} bytes", line.size()),
           fmt::format("a record has at most {}", kMaxLineBytes));
    }
    require_utf8(line, "its text", number_);
    read_object(record, parse_own(line, where), use_, folder_, where);
  } catch (const Error& error) {
    record.error = error.what();
    if (!record.error.starts_with(where)) record.error = where + ": " + record.error;
  }
  require_new_id(record, "line");
  return record;
}

Record RecordLines::read(const nlohmann::json& element) {
  if (element.is_string()) return read_name(element.get<std::string>());
  Record record;
  record.line = ++number_;
  try {
    if (!element.is_object()) {
      fail(fmt::format("element {}", number_),
           element.is_array() ? "is a list" : "is " + printable(element.dump()),
           fmt::format("write it like {}, or as a file name in quotes", kRecordExample));
    }
    read_object(record, element, use_, folder_, fmt::format("record {}", number_));
  } catch (const Error& error) {
    record.error = error.what();
  }
  require_new_id(record, "record");
  return record;
}

Record RecordLines::read_name(const std::string& name) {
  Record record;
  record.line = ++number_;
  record.listed = true;
  set_name(record, name);
  if (!record.error.empty()) return record;
  for (int count = 2; ids_.contains(json_line(record.id)); ++count) {
    record.id = fmt::format("{}#{}", name, count);  // a name that is listed again
  }
  require_new_id(record, "line");
  const bool video = has_video_suffix(name);
  try {
    std::string path = path_in(folder_, name, video ? "video" : "image");
    std::error_code unknown;
    if (!fs::exists(path, unknown) && fs::exists(name, unknown)) path = name;
    (video ? record.videos : record.images).push_back(std::move(path));
  } catch (const Error& error) {
    record.error = error.what();
  }
  return record;
}

std::vector<Record> parse_records(std::string_view text, const fs::path& folder, RecordUse use) {
  std::vector<Record> records;
  RecordLines lines(folder, use);
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (auto record = lines.parse(text.substr(0, end))) records.push_back(std::move(*record));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return records;
}

std::vector<Record> parse_list(std::string_view bytes, const std::string& name,
                               const fs::path& folder, RecordUse use) {
  const std::string flag =
      fmt::format("{} {}", use == RecordUse::kAnswer ? "--batch" : "--data", printable(name));
  require_text(bytes, flag, name);
  const std::string text = TextDecoder(flag).decode(bytes, true);
  RecordLines lines(folder, use);
  std::vector<Record> records;
  switch (form_of_list(text, flag, name)) {
    case ListForm::kLines:
      return parse_records(text, folder, use);
    case ListForm::kObject:
      records.push_back(lines.read(parse_own(record_text(text), flag)));
      break;
    case ListForm::kArray: {
      require_utf8(text, flag);
      const nlohmann::json array = parse_own(record_text(text), flag);
      for (const nlohmann::json& element : array) records.push_back(lines.read(element));
      break;
    }
    case ListForm::kNames:
      for (std::string_view rest = text; !rest.empty();) {
        const size_t end = std::min(rest.find('\n'), rest.size());
        const std::string_view line = rest.substr(0, end);
        rest.remove_prefix(std::min(end + 1, rest.size()));
        if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
        records.push_back(lines.read_name(std::string(line)));
      }
  }
  return records;
}

std::vector<Record> picture_records(const std::vector<std::string>& paths, const fs::path& folder) {
  std::vector<Record> records;
  for (const std::string& path : paths) {
    Record record;
    record.line = records.size() + 1;
    record.listed = true;
    (has_video_suffix(path) ? record.videos : record.images)
        .push_back(path == kStandardInput ? picture_file_path(path) : path);
    set_name(record, folder.empty() ? path : fs::path(path).lexically_relative(folder).string());
    records.push_back(std::move(record));
  }
  return records;
}

std::vector<Record> read_records(const std::string& batch, const std::string& output,
                                 std::string* left_out) {
  const bool folder = is_folder(batch);
  if (!folder && !is_pattern(batch)) {
    const std::string text = read_input(
        batch, kMaxBytes, "--batch " + batch,
        "a JSON Lines file of records, a folder of images, or a pattern such as 'images/*.png'");
    return parse_list(text, batch, fs::path(batch).parent_path());
  }
  const auto is_output = [&](const std::string& path) {
    std::error_code ignored;
    return is_shard_file(path, output) || fs::equivalent(path, output, ignored);
  };
  std::string others;
  std::vector<std::string> paths =
      folder ? images_in(batch, is_output, others) : files_of_pattern(batch, is_output, others);
  if (paths.empty()) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("--batch {} {}; give a folder with images, a pattern that matches some, or a "
                    "file of records",
                    printable(batch),
                    !folder && others.empty() ? "matches no file"
                    : others.empty()          ? "has no image file (.png, .jpg, ...)"
                                     : "has no image file (.png, .jpg, ...): it " + others));
  }
  if (left_out != nullptr && !others.empty()) {
    *left_out = fmt::format("--batch {} {}", printable(batch), others);
  }
  return picture_records(paths, folder ? batch : folder_of_pattern(batch));
}

}  // namespace kvlm
