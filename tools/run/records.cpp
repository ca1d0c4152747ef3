#include "tools/run/records.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "kernels/base/error.h"
#include "runtime/config.h"

namespace kvlm {

namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file || file.bad() || std::filesystem::is_directory(path)) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("--batch {} cannot be read: {}; give a file with one JSON record a line", path,
                    std::strerror(errno == 0 ? EIO : errno)));
  }
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    lines.push_back(std::move(line));
  }
  return lines;
}

/// A relative path is relative to the records' own folder.
std::string resolve(const std::filesystem::path& folder, const std::string& path) {
  return std::filesystem::path(path).is_absolute() ? path : (folder / path).string();
}

void parse_into(Record& record, const std::string& line, const std::filesystem::path& folder) {
  const nlohmann::json json = parse_json(line, fmt::format("line {}", record.line));
  const ConfigReader reader(json, fmt::format("line {}", record.line));
  const nlohmann::json& id = reader.raw("id");
  if (!id.is_string() && !id.is_number_integer()) reader.fail("id", "a string or an integer");
  record.id = id;
  if (reader.has("video")) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("line {}: videos are not built in for this model; give its frames as "
                            "images",
                            record.line));
  }
  if (reader.has("image")) record.images.push_back(reader.required_string("image"));
  const nlohmann::json& images = reader.raw("images");
  if (!images.is_null() && !images.is_array()) reader.fail("images", "a list of file names");
  for (const nlohmann::json& image : images) {
    if (!image.is_string()) reader.fail("images", "a list of file names");
    record.images.push_back(image.get<std::string>());
  }
  for (std::string& image : record.images) image = resolve(folder, image);
  record.prompt = reader.string("prompt", "");
  if (record.images.empty() && record.prompt.empty()) {
    reader.fail("image", "a file name, or images, or a prompt");
  }
}

}  // namespace

std::vector<Record> read_records(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::vector<Record> records;
  std::map<std::string, size_t> seen;
  size_t number = 0;
  for (const std::string& line : lines_of(read_file(path))) {
    ++number;
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    Record record;
    record.line = number;
    try {
      parse_into(record, line, folder);
      const auto [first, inserted] = seen.emplace(record.id.dump(), number);
      if (!inserted) {
        record.error =
            fmt::format("line {}: id {} is that of line {} too; give each record its own", number,
                        record.id.dump(), first->second);
        record.id = nullptr;
      }
    } catch (const Error& error) {
      record.error = error.what();
    }
    records.push_back(std::move(record));
  }
  return records;
}

}  // namespace kvlm
