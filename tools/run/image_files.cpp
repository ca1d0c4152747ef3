#include "tools/run/image_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <span>
#include <system_error>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "vision/frame_folder.h"
#include "vision/image.h"

// Which files a folder or a pattern of --batch names. The shell's patterns are matched a name at a
// time, because glob() has no **.
namespace kvlm {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWildcards = "*?[";
constexpr std::string_view kAnyDepth = "**";
constexpr std::array<std::string_view, 14> kVideoSuffixes = {
    ".mp4",  ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg",
    ".mpeg", ".ts",  ".3gp",  ".flv", ".wmv", ".ogv", ".m2ts"};

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

[[noreturn]] void refuse_folder(const fs::path& folder, const std::error_code& error) {
  throw Error(
      ErrorCode::kCorruptFile,
      fmt::format("--batch: the folder {} cannot be read: {}; give folders that you may read",
                  printable(folder.string()), error.message()));
}

/// By name, so that the order does not depend on the file system.
std::vector<fs::directory_entry> entries_of(const fs::path& folder) {
  std::vector<fs::directory_entry> entries;
  std::error_code error;
  const fs::path path = folder.empty() ? fs::path(".") : folder;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    entries.push_back(*it);
  }
  if (error) refuse_folder(path, error);
  std::ranges::sort(entries);
  return entries;
}

bool is_folder(const fs::directory_entry& entry) {
  std::error_code unknown;
  return entry.is_directory(unknown);
}

/// Whether a file is an image, whatever its name.
bool is_image(const fs::directory_entry& entry) {
  std::error_code unknown;
  if (!entry.is_regular_file(unknown)) return false;
  std::string head(64, '\0');
  std::ifstream file(entry.path(), std::ios::binary);
  file.read(head.data(), static_cast<std::streamsize>(head.size()));
  return begins_like_image(std::string_view(head).substr(0, static_cast<size_t>(file.gcount())));
}

std::vector<std::string> names_of(const std::string& pattern) {
  std::vector<std::string> names;
  for (const fs::path& name : fs::path(pattern).relative_path()) names.push_back(name.string());
  return names;
}

std::string counted(size_t count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

/// The images of a folder or of a pattern's last **, and how much of it is left out.
struct Found {
  std::vector<std::string> paths;
  size_t folders = 0;
  size_t links = 0;  // to folders, for they may be loops
  size_t hidden = 0;
  size_t videos = 0;
  size_t disguised = 0;
  size_t others = 0;

  /// Takes `path`, which is that of the entry, if it is named like an image.
  void take(const fs::directory_entry& entry, const std::string& path) {
    if (is_hidden(entry)) {
      ++hidden;
    } else if (is_folder(entry)) {
      ++(entry.is_symlink() ? links : folders);
    } else if (has_picture_suffix(path)) {
      paths.push_back(path);
    } else if (has_video_suffix(path)) {
      ++videos;
    } else {
      ++(is_image(entry) ? disguised : others);
    }
  }

  /// A sentence on what is left out, with the way to get it; empty if nothing is. `folder`: where
  /// the folders are.
  std::string left_out(const std::string& folder) const {
    std::vector<std::string> parts;
    if (folders > 0) {
      parts.push_back(fmt::format("{} (give '{}' for images of all depths)",
                                  counted(folders, "folder"),
                                  printable((fs::path(folder) / kAnyDepth).string())));
    }
    if (links > 0) parts.push_back(counted(links, "link") + " to folders (give each by itself)");
    if (disguised > 0) {
      parts.push_back(fmt::format("{} not named like one (rename to .jpg or .png)",
                                  counted(disguised, "image")));
    }
    if (videos > 0) {
      parts.push_back(
          fmt::format("{} (list them in a file, one path a line)", counted(videos, "video")));
    }
    if (hidden > 0) parts.push_back(counted(hidden, "hidden file"));
    if (others > 0) parts.push_back(counted(others, "other file"));
    if (parts.empty()) return {};
    return fmt::format("takes {} and leaves out {}", counted(paths.size(), "image"),
                       fmt::join(parts, ", "));
  }
};

/// Adds the files below `folder` that `names` match, one after the other.
void match(const fs::path& folder, std::span<const std::string> names, const IgnoreFile& ignored,
           Found& found) {
  const std::string& name = names.front();
  const bool last = names.size() == 1;
  if (name == kAnyDepth) {
    if (!last) match(folder, names.subspan(1), ignored, found);
    for (const fs::directory_entry& entry : entries_of(folder)) {
      const fs::path path = folder / entry.path().filename();
      const bool walked = is_folder(entry) && !is_hidden(entry) && !entry.is_symlink();
      if (walked) match(path, names, ignored, found);
      if (last && !walked && !ignored(path.string())) found.take(entry, path.string());
    }
    return;
  }
  const auto take = [&](const fs::path& path) {
    std::error_code unknown;
    const bool directory = fs::is_directory(path, unknown);
    if (last && !directory && fs::exists(path, unknown) && !ignored(path.string())) {
      found.paths.push_back(path.string());
    }
    if (!last && directory) match(path, names.subspan(1), ignored, found);
  };
  if (name.find_first_of("*?[\\") == std::string::npos) return take(folder / name);
  for (const fs::directory_entry& entry : entries_of(folder)) {
    const std::string file = entry.path().filename().string();
    if (fnmatch(name.c_str(), file.c_str(), FNM_PERIOD) == 0) take(folder / file);
  }
}

}  // namespace

std::vector<std::string> images_in(const std::string& folder, const IgnoreFile& ignored,
                                   std::string& left_out) {
  Found found;
  for (const fs::directory_entry& entry : entries_of(folder)) {
    const std::string path = entry.path().string();
    if (!ignored(path)) found.take(entry, path);
  }
  left_out = found.left_out(folder);
  return std::move(found.paths);
}

bool is_pattern(const std::string& path) {
  std::error_code ignored;
  return path.find_first_of(kWildcards) != std::string::npos && !fs::exists(path, ignored);
}

std::vector<std::string> files_of_pattern(const std::string& pattern, const IgnoreFile& ignored,
                                          std::string& left_out) {
  Found found;
  const std::string folder = folder_of_pattern(pattern);
  const std::vector<std::string> names = names_of(pattern.substr(folder.size()));
  std::error_code unknown;
  if (folder.empty() || fs::is_directory(folder, unknown)) match(folder, names, ignored, found);
  std::ranges::sort(found.paths);
  const auto repeated = std::ranges::unique(found.paths);  // a/**/**/b finds some twice
  found.paths.erase(repeated.begin(), repeated.end());
  left_out = found.left_out(folder);
  return std::move(found.paths);
}

std::string folder_of_pattern(const std::string& pattern) {
  const size_t slash = pattern.rfind('/', pattern.find_first_of(kWildcards));
  return slash == std::string::npos ? std::string() : pattern.substr(0, slash + 1);
}

bool begins_like_image(std::string_view head) {
  using namespace std::string_view_literals;
  constexpr std::array kStarts = {
      "\xff\xd8\xff"sv, "\x89PNG\r\n\x1a\n"sv, "GIF87a"sv, "GIF89a"sv, "II*\0"sv, "MM\0*"sv};
  const std::string_view brand = head.substr(std::min<size_t>(4, head.size()), 8);
  constexpr std::array kBrands = {"ftypavi"sv, "ftyphei"sv, "ftyphev"sv, "ftypmif1"sv,
                                  "ftypmsf1"sv};
  if (std::ranges::any_of(kBrands, [&](auto start) { return brand.starts_with(start); }))
    return true;
  // "BM" alone may begin a text; bytes that are reserved are zero.
  if (head.starts_with("BM")) return head.size() >= 10 && head.substr(6, 4) == "\0\0\0\0"sv;
  if (head.starts_with("RIFF")) return head.substr(std::min<size_t>(8, head.size()), 4) == "WEBP";
  return std::ranges::any_of(kStarts,
                             [&](std::string_view start) { return head.starts_with(start); });
}

bool has_video_suffix(std::string_view name) {
  std::string suffix = fs::path(name).extension().string();
  for (char& c : suffix) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return std::ranges::find(kVideoSuffixes, suffix) != kVideoSuffixes.end();
}

}  // namespace kvlm
