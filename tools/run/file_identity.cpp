#include "tools/run/file_identity.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

namespace kvlm {

namespace {

namespace fs = std::filesystem;

std::string hash_of_folder(const fs::path& folder) {
  std::vector<std::string> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code unknown;
    files.push_back(
        fmt::format("{}\n{}\n", it->path().filename().string(), it->file_size(unknown)));
  }
  if (error) return {};
  std::ranges::sort(files);
  std::string text;
  for (const std::string& file : files) text += file;
  return hash_of(text);
}

}  // namespace

std::string hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return fmt::format("{:016x}", hash);
}

std::string content_hash(const std::string& path) {
  constexpr std::streamoff kEnd = 1 << 16;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) return hash_of_folder(path);
  if (!fs::is_regular_file(status)) return {};  // reading a pipe takes what is in it
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file.tellg();
  if (!file || size < 0) return {};
  std::string text = fmt::format("{}\n", size);
  const auto append = [&](std::streamoff from, std::streamoff to) {
    const size_t before = text.size();
    text.resize(before + static_cast<size_t>(to - from));
    file.seekg(from);
    file.read(text.data() + before, to - from);
  };
  append(0, std::min(size, kEnd));
  append(std::max(std::min(size, kEnd), size - kEnd), size);
  return file ? hash_of(text) : std::string();
}

}  // namespace kvlm
