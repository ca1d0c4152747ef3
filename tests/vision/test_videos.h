#pragma once

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "tests/vision/test_images.h"
#include "vision/video.h"

namespace kvlm::test {

/// tests/vision/data/video, written by tests/vision/make_videos.py.
inline std::filesystem::path video_data() { return data_folder() / "video"; }

/// The frame that make_videos.py codes as the i-th of its clips.
inline Image numbered(int i) {
  Image frame = picture("smooth", 16, 24);
  const Image noise = picture("noise", 8, 8 * (i + 1));
  for (size_t y = 0; y < 8; ++y) {
    const auto* from =
        noise.rgb.data() +
        (y * static_cast<size_t>(noise.width) + static_cast<size_t>(noise.width - 8)) * 3;
    std::copy_n(from, 24, frame.rgb.data() + y * 24 * 3);
  }
  return frame;
}

inline std::vector<int64_t> all_of(const VideoFile& video) {
  std::vector<int64_t> frames(static_cast<size_t>(video.info().frames));
  std::iota(frames.begin(), frames.end(), 0);
  return frames;
}

/// A folder that is removed with what is in it.
class TemporaryFolder {
 public:
  TemporaryFolder()
      : path_(std::filesystem::temp_directory_path() / ("kvlm_video_" + std::to_string(getpid()))) {
    std::filesystem::create_directory(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Writes a file and returns its path.
  std::filesystem::path file(const std::string& name, std::string_view content = "") const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

/// The message of the Error that opening `path` throws.
inline std::string video_error(ErrorCode code, const std::filesystem::path& path) {
  return error_of(code, [&] { open_video(path); });
}

}  // namespace kvlm::test
