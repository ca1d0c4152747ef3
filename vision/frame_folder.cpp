#include "vision/frame_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <span>
#include <system_error>
#include <utility>

#include "vision/decoders.h"
#include "vision/video_sources.h"

// A folder of images as a video: which of its files are frames, in which order, and which are not.
namespace kvlm {

namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 21> kSuffixes = {
    ".png", ".apng", ".jpg", ".jpeg", ".jpe",  ".jfif", ".webp", ".gif",  ".bmp", ".dib", ".pgm",
    ".ppm", ".pnm",  ".tga", ".tif",  ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl"};

bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

/// Takes the run of digits that `text` begins with, without leading zeros.
std::string_view take_number(std::string_view& text) noexcept {
  size_t end = 0;
  while (end < text.size() && is_digit(text[end])) ++end;
  std::string_view number = text.substr(0, end);
  text.remove_prefix(end);
  while (number.size() > 1 && number[0] == '0') number.remove_prefix(1);
  return number;
}

/// The files of a folder that are named like images; counts others that are.
std::vector<std::string> frame_files(const fs::path& folder, const std::string& name,
                                     int64_t& unnamed) {
  std::vector<std::string> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::string file = it->path().filename().string();
    std::error_code unknown;
    if (file.starts_with('.') || it->is_directory(unknown)) continue;
    if (!has_picture_suffix(file)) {
      unnamed += is_unnamed_picture(it->path());
      continue;
    }
    files.push_back(std::move(file));
    check_frame_count(static_cast<int64_t>(files.size()), name);
  }
  if (error) {
    throw_video(
        ErrorCode::kCorruptFile, name,
        fmt::format("cannot be read ({}); give a folder that you may read", error.message()));
  }
  if (files.empty()) {
    throw_video(ErrorCode::kCorruptFile, name,
                "is a folder without image files (.png, .jpg, ...); give a folder of frames, or a "
                "video file");
  }
  std::ranges::sort(files, natural_less);
  return files;
}

class FrameFolder : public VideoFile {
 public:
  FrameFolder(VideoInfo info, fs::path folder, std::vector<std::string> files)
      : VideoFile(std::move(info), {}), folder_(std::move(folder)), files_(std::move(files)) {}

 private:
  void decode_frames(std::span<const int64_t> frames,
                     const std::function<void(Image)>& take) override {
    for (const int64_t frame : frames) take(load_image(folder_ / files_[place_of(frame)]));
  }
  void rest_frames(std::span<const int64_t> frames) override {
    std::vector<std::string> files;
    for (const int64_t frame : frames) files.push_back(std::move(files_[place_of(frame)]));
    files_ = std::move(files);
    numbers_.assign(frames.begin(), frames.end());
  }

  size_t place_of(int64_t frame) const {
    if (numbers_.empty()) return static_cast<size_t>(frame);
    return static_cast<size_t>(std::ranges::lower_bound(numbers_, frame) - numbers_.begin());
  }

  fs::path folder_;
  std::vector<std::string> files_;  // names in the folder
  std::vector<int64_t> numbers_;    // of their frames; empty: all
};

}  // namespace

bool has_picture_suffix(std::string_view name) {
  std::string suffix = fs::path(name).extension().string();
  for (char& c : suffix) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return std::ranges::find(kSuffixes, suffix) != kSuffixes.end();
}

bool is_unnamed_picture(const fs::path& path) {
  if (path.has_extension()) return false;
  std::ifstream file;
  std::error_code unknown;
  if (fs::is_regular_file(path, unknown)) file.open(path, std::ios::binary);
  std::array<char, 64> head{};
  file.read(head.data(), head.size());
  const auto count = static_cast<size_t>(file.gcount());
  const std::string_view format = picture_format(std::as_bytes(std::span(head).first(count)));
  return !format.empty() && format != "PNM" && format != "TGA";  // whose letters begin anything
}

bool natural_less(std::string_view a, std::string_view b) noexcept {
  std::string_view rest_a = a;
  std::string_view rest_b = b;
  while (!rest_a.empty() && !rest_b.empty()) {
    if (is_digit(rest_a[0]) && is_digit(rest_b[0])) {
      const std::string_view number_a = take_number(rest_a);
      const std::string_view number_b = take_number(rest_b);
      if (number_a.size() != number_b.size()) return number_a.size() < number_b.size();
      if (number_a != number_b) return number_a < number_b;
      continue;
    }
    if (rest_a[0] != rest_b[0]) return rest_a.substr(0, 1) < rest_b.substr(0, 1);
    rest_a.remove_prefix(1);
    rest_b.remove_prefix(1);
  }
  if (rest_a.empty() != rest_b.empty()) return rest_a.empty();
  return a < b;
}

std::unique_ptr<VideoFile> open_frame_folder(const fs::path& folder, const std::string& name) {
  int64_t unnamed = 0;
  std::vector<std::string> files = frame_files(folder, name, unnamed);
  const ImageInfo first = probe_image(folder / files[0]);
  check_frame_size(first.height, first.width, name);
  VideoInfo info{.name = name,
                 .format = "folder of images",
                 .frames = static_cast<int64_t>(files.size()),
                 .height = first.height,
                 .width = first.width};
  if (unnamed > 0) {
    info.warnings.push_back(fmt::format(
        "video {} leaves out {} file{} of its folder without the suffix of an image "
        "({}); name them like .png or .jpg",
        name, unnamed, unnamed == 1 ? "" : "s",
        unnamed == 1 ? "it is one by its content" : "they are images by their content"));
  }
  return std::make_unique<FrameFolder>(std::move(info), folder, std::move(files));
}

}  // namespace kvlm
