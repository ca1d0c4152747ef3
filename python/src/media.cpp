#include "python/src/media.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "kernels/base/error.h"

namespace kvlm::python {

namespace {

/// Frames that are in memory.
class FramesInMemory final : public VideoFile {
 public:
  FramesInMemory(VideoInfo info, std::vector<double> times,
                 std::shared_ptr<const std::vector<SentImage>> frames)
      : VideoFile(std::move(info), std::move(times)), frames_(std::move(frames)) {}

 private:
  void decode_frames(std::span<const int64_t> frames,
                     const std::function<void(Image)>& take) override {
    for (const int64_t frame : frames) {
      Image copy = (*frames_)[static_cast<size_t>(frame)].pixels();
      copy.name = fmt::format("{}, frame {}", info().name, frame);
      take(std::move(copy));
    }
  }
  void rest_frames(std::span<const int64_t>) override {}

  std::shared_ptr<const std::vector<SentImage>> frames_;
};

}  // namespace

SentImage SentImage::from_file(const std::string& path) {
  SentImage made;
  made.name_ = image_name(path);
  made.bytes_ = read_image(path);
  return made;
}

SentImage SentImage::from_bytes(std::vector<std::byte> bytes) {
  SentImage made;
  made.bytes_ = std::move(bytes);
  if (made.bytes_.empty()) {
    throw Error(ErrorCode::kCorruptFile, "an image has no bytes; give those of a whole file");
  }
  return made;
}

SentImage SentImage::from_pixels(int height, int width, std::vector<uint8_t> rgb) {
  SentImage made;
  made.pixels_.height = height;
  made.pixels_.width = width;
  made.pixels_.rgb = std::move(rgb);
  return made;
}

PictureShape SentImage::shape(size_t number) const {
  const std::string name = name_.empty() ? std::to_string(number) : name_;
  if (bytes_.empty()) return {pixels_.height, pixels_.width, name};
  const ImageInfo info = probe_image(bytes_, name);
  return {info.height, info.width, name};
}

Image SentImage::decode(size_t number) const {
  const std::string name = name_.empty() ? std::to_string(number) : name_;
  if (!bytes_.empty()) return decode_image(bytes_, name);
  Image copy = pixels_;
  copy.name = name;
  return copy;
}

SentVideo SentVideo::from_file(std::string path) {
  SentVideo made;
  made.path_ = std::move(path);
  return made;
}

SentVideo SentVideo::from_frames(std::vector<SentImage> frames, double fps) {
  if (frames.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "a clip has no frames; give at least one");
  }
  if (!std::isfinite(fps) || fps < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a clip has {} frames a second; expected 0 (unknown) or more", fps));
  }
  SentVideo made;
  const Image& first = frames.front().pixels();
  for (size_t i = 0; i < frames.size(); ++i) {
    const Image& frame = frames[i].pixels();
    if (frame.height != first.height || frame.width != first.width) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("frame {} of a clip is {} x {}, the first is {} x {}; scale them to "
                              "one size",
                              i, frame.width, frame.height, first.width, first.height));
    }
  }
  made.info_.name = "the clip";
  made.info_.format = "frames in memory";
  made.info_.frames = static_cast<int64_t>(frames.size());
  made.info_.height = first.height;
  made.info_.width = first.width;
  made.info_.fps = fps;
  made.info_.duration_s = fps > 0 ? static_cast<double>(frames.size()) / fps : 0;
  made.frames_ = std::make_shared<const std::vector<SentImage>>(std::move(frames));
  return made;
}

std::unique_ptr<VideoFile> SentVideo::open() const {
  if (frames_ == nullptr) return open_video(path_);
  std::vector<double> times;
  for (int64_t i = 0; info_.fps > 0 && i < info_.frames; ++i) {
    times.push_back(static_cast<double>(i) / info_.fps);
  }
  return std::make_unique<FramesInMemory>(info_, std::move(times), frames_);
}

}  // namespace kvlm::python
