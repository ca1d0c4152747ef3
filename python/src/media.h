#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/clip_file.h"
#include "vision/image.h"
#include "vision/video.h"

namespace kvlm::python {

/// An image as a caller gave it: a file's bytes, decoded when its turn comes, or pixels.
class SentImage {
 public:
  /// Throws as read_image().
  static SentImage from_file(const std::string& path);
  static SentImage from_bytes(std::vector<std::byte> bytes);
  /// `rgb` has height * width * 3 values.
  static SentImage from_pixels(int height, int width, std::vector<uint8_t> rgb);

  /// `number` counts the images of a request, for messages. Throws as probe_image().
  PictureShape shape(size_t number) const;
  /// Throws as decode_image().
  Image decode(size_t number) const;
  const Image& pixels() const noexcept { return pixels_; }

 private:
  std::string name_;  // of a file
  std::vector<std::byte> bytes_;
  Image pixels_;
};

/// A video as a caller gave it: a file, or frames.
class SentVideo {
 public:
  static SentVideo from_file(std::string path);
  /// Frames of one size that a model may choose among; `fps` of 0: unknown. Throws
  /// Error{kInvalidArgument}.
  static SentVideo from_frames(std::vector<SentImage> frames, double fps);

  /// Throws as open_video().
  std::unique_ptr<VideoFile> open() const;

 private:
  std::string path_;
  std::shared_ptr<const std::vector<SentImage>> frames_;
  VideoInfo info_;
};

}  // namespace kvlm::python
