#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "tests/vision/test_images.h"
#include "vision/video.h"

namespace kvlm::test {

/// tests/vision/data/video, written by tests/vision/make_videos.py.
inline std::filesystem::path video_data() { return data_folder() / "video"; }

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
