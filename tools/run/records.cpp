#include "tools/run/records.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <glob.h>

#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <system_error>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/words.h"
#include "runtime/loading/config.h"
#include "tools/common/input_text.h"
#include "tools/run/pictures.h"
#include "tools/run/report.h"
#include "tools/run/shard.h"
#include "tools/run/videos.h"
#include "vision/frame_folder.h"
#include "vision/image.h"

// The requests of a batch: lines of JSON, a list of pictures, folders and patterns. A line that
// cannot be read becomes a record with an error, in its place; only a file that is no list at all
// is refused.
namespace kvlm {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr size_t kMaxBytes = size_t{1} << 29;
constexpr size_t kMaxLineBytes = size_t{1} << 26;
constexpr std::array<std::string_view, 6> kKeys = {"id",    "image",  "images",
                                                   "video", "videos", "prompt"};
constexpr const char* kExample = R"({"id": 1, "image": "a.png", "prompt": "What is this?"})";

[[noreturn]] void fail(size_t line, const std::string& defect, const std::string& cure) {
  throw Error(ErrorCode::kCorruptFile, fmt::format("line {}: {}; {}", line, defect, cure));
}

/// parse_json(), which speaks of files that are downloaded, with the advice for one's own.
nlohmann::json parse_line(std::string_view text, size_t line) {
  try {
    return parse_json(text, "no JSON");
  } catch (const Error& error) {
    const std::string message = error.what();
    fail(line, message.substr(0, message.rfind("; ")), fmt::format("write it like {}", kExample));
  }
}

void require_known_keys(const nlohmann::json& json, size_t line) {
  for (const auto& [key, value] : json.items()) {
    if (std::ranges::find(kKeys, key) != kKeys.end()) continue;
    fail(line,
         fmt::format("has the key \"{}\"; did you mean \"{}\"?", printable(key),
                     nearest_spelling(key, {kKeys.begin(), kKeys.end()})),
         fmt::format("the keys of a record are {}", fmt::join(kKeys, ", ")));
  }
}

/// The names under `one` and in the list under `many`.
std::vector<std::string> read_names(const ConfigReader& reader, const char* one, const char* many) {
  std::vector<std::string> names;
  if (reader.has(one)) names.push_back(reader.required_string(one));
  const nlohmann::json& list = reader.raw(many);
  if (!list.is_null() && !list.is_array()) reader.fail(many, "a list of file names");
  for (const nlohmann::json& name : list) {
    if (!name.is_string()) reader.fail(many, "a list of file names");
    names.push_back(name.get<std::string>());
  }
  return names;
}

void parse_into(Record& record, std::string_view text, const fs::path& folder) {
  if (text.size() > kMaxLineBytes) {
    fail(record.line, fmt::format("has {} bytes", text.size()),
         fmt::format("a record has at most {}", kMaxLineBytes));
  }
  const nlohmann::json json = parse_line(text, record.line);
  const ConfigReader reader(json, fmt::format("line {}", record.line));
  const nlohmann::json& id = reader.raw("id");
  if (!id.is_string() && !id.is_number_integer()) reader.fail("id", "a string or an integer");
  record.id = id;
  require_known_keys(json, record.line);
  record.images = read_names(reader, "image", "images");
  for (std::string& image : record.images) image = (folder / picture_file_path(image)).string();
  record.videos = read_names(reader, "video", "videos");
  for (std::string& video : record.videos) video = (folder / video_file_path(video)).string();
  record.prompt = reader.string("prompt", "");
  if (record.images.empty() && record.videos.empty() && record.prompt.empty()) {
    reader.fail("image", "a file name, or images, a video, videos, or a prompt");
  }
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

bool is_pattern(const std::string& path) {
  std::error_code ignored;
  return path.find_first_of("*?[") != std::string::npos && !fs::exists(path, ignored);
}

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

/// Refuses what was to be a file of records and is a picture, of a format that is read or not.
void require_no_picture(std::string_view text, const std::string& name) {
  const size_t start = text.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos || text[start] == '{') return;
  bool picture = has_picture_suffix(name);
  try {
    probe_image(std::as_bytes(std::span(text)), name);
    picture = true;
  } catch (const Error& error) {
    picture = picture || error.code() == ErrorCode::kUnsupported;
  }
  if (!picture) return;
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("--batch {0} is an image, not a file of records; give --image {0}, or "
                          "for many a folder or a quoted pattern such as 'images/*.png'",
                          printable(name)));
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

bool same_path(const Json& a, const Json& b) {
  std::error_code unknown;
  return a == b || fs::equivalent(a.get<std::string>(), b.get<std::string>(), unknown);
}

/// What difference_of_asked() says of files, each of which is a `noun`.
std::optional<std::string> difference_of_files(const Json& before, const Json& after,
                                               const char* noun) {
  if (std::ranges::equal(before, after, same_path)) return std::nullopt;
  const auto place = std::ranges::mismatch(before, after, same_path);
  const auto name = [noun](const Json& files, auto at) {
    return at == files.end()
               ? fmt::format("{} {}{}", files.size(), noun, files.size() == 1 ? "" : "s")
               : end_of_path(at->template get<std::string>());
  };
  return fmt::format("about {}, but this run asks about {}", name(before, place.in1),
                     name(after, place.in2));
}

std::vector<std::string> pictures_in(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string path = it->path().string();
    if (has_picture_suffix(path) && !is_hidden(path) && !is_folder(path)) paths.push_back(path);
  }
  if (error) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("--batch {} cannot be read: {}; give a folder that you may read",
                            printable(folder), error.message()));
  }
  std::ranges::sort(paths);
  return paths;
}

std::vector<std::string> matches_of(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found) == 0) {
    for (size_t i = 0; i < found.gl_pathc; ++i) {
      if (!is_folder(found.gl_pathv[i])) paths.emplace_back(found.gl_pathv[i]);
    }
  }
  globfree(&found);
  std::ranges::sort(paths);
  return paths;
}

/// The part of a pattern that names one folder: all before the first piece with a wildcard.
std::string folder_of(const std::string& pattern) {
  const size_t slash = pattern.rfind('/', pattern.find_first_of("*?["));
  return slash == std::string::npos ? std::string() : pattern.substr(0, slash + 1);
}

}  // namespace

Json asked_of(const Record& record) {
  Json asked = Json::object();
  for (const std::string& image : record.images) asked["images"].push_back(absolute_path(image));
  for (const std::string& video : record.videos) asked["videos"].push_back(absolute_path(video));
  if (!record.prompt.empty()) asked["prompt"] = record.prompt;
  return Json::parse(json_line(asked));  // as it is read back
}

std::optional<std::string> difference_of_asked(const Json& earlier, const Json& now) {
  if (earlier.empty()) return std::nullopt;
  const Json none = Json::array();
  for (const auto& [key, noun] : {std::pair("images", "image"), std::pair("videos", "video")}) {
    const auto differs = difference_of_files(earlier.value(key, none), now.value(key, none), noun);
    if (differs) return differs;
  }
  const auto prompt = [](const Json& asked) {
    return asked.contains("prompt")
               ? fmt::format("the prompt \"{}\"", printable(asked["prompt"].get<std::string>()))
               : std::string("no prompt of its own");
  };
  if (earlier.value("prompt", "") == now.value("prompt", "")) return std::nullopt;
  return fmt::format("with {}, but this run has {}", prompt(earlier), prompt(now));
}

std::optional<Record> RecordLines::parse(std::string_view line) {
  ++number_;
  if (line.find_first_not_of(" \t\r") == std::string_view::npos) return std::nullopt;
  if (line.back() == '\r') line.remove_suffix(1);
  Record record;
  record.line = number_;
  try {
    parse_into(record, line, folder_);
  } catch (const Error& error) {
    record.error = error.what();
  }
  if (record.id.is_null()) return record;
  const auto [first, inserted] = ids_.emplace(json_line(record.id), number_);
  if (inserted) return record;
  record.error = fmt::format("line {}: id {} is also the id of line {}; give each record its own",
                             number_, printable(first->first), first->second);
  record.id = nullptr;
  return record;
}

std::vector<Record> parse_records(std::string_view text, const fs::path& folder) {
  std::vector<Record> records;
  RecordLines lines(folder);
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (auto record = lines.parse(text.substr(0, end))) records.push_back(std::move(*record));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return records;
}

std::vector<Record> parse_list(std::string_view text, const std::string& name,
                               const fs::path& folder) {
  require_no_picture(text, name);
  return parse_records(text, folder);
}

std::vector<Record> picture_records(const std::vector<std::string>& paths, const fs::path& folder) {
  std::vector<Record> records;
  for (const std::string& path : paths) {
    Record record;
    record.line = records.size() + 1;
    record.listed = true;
    record.images.push_back(path == kStandardInput ? picture_file_path(path) : path);
    const std::string name =
        folder.empty() ? path : fs::path(path).lexically_relative(folder).string();
    if (nlohmann::json::parse(json_line(name)) == name) {  // bytes that are not UTF-8 change
      record.id = name;
    } else {
      record.error = fmt::format(
          "image {} has a name that is not UTF-8, which cannot be an id; rename it, or name it in "
          "a record",
          printable(path));
    }
    records.push_back(std::move(record));
  }
  return records;
}

std::vector<Record> read_records(const std::string& batch, const std::string& output) {
  const bool folder = is_folder(batch);
  if (!folder && !is_pattern(batch)) {
    const std::string text = read_input(
        batch, kMaxBytes, "--batch " + batch,
        "a JSON Lines file of records, a folder of images, or a pattern such as 'images/*.png'");
    return parse_list(text, batch, fs::path(batch).parent_path());
  }
  std::vector<std::string> paths = folder ? pictures_in(batch) : matches_of(batch);
  std::erase_if(paths, [&](const std::string& path) {
    std::error_code ignored;
    return is_shard_file(path, output) || fs::equivalent(path, output, ignored);
  });
  if (paths.empty()) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("--batch {} {}; give a folder with images, a pattern that matches "
                            "some, or a file of records",
                            printable(batch),
                            folder ? "has no image file (.png, .jpg, ...)" : "matches no file"));
  }
  return picture_records(paths, folder ? batch : folder_of(batch));
}

}  // namespace kvlm
