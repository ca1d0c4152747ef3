#include "vision/video.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "vision/decoders.h"
#include "vision/video_sources.h"

// Opens a video file, an animated picture or a folder of pictures; frames are decoded when they are
// asked for. Sizes and counts are bounded before memory is taken.
namespace kvlm {

namespace {

constexpr size_t kHeadBytes = 4096;
constexpr int64_t kMaxAnimationBytes = int64_t{1} << 30;
constexpr int64_t kMaxReadPixels = int64_t{1} << 30;

/// What `action` returns; that the memory does not hold it becomes an Error that names the video.
/// The decoders of an animation call it an image.
template <class Action>
auto with_memory(const std::string& name, Action&& action) {
  try {
    return action();
  } catch (const Error& error) {
    const std::string_view message = error.what();
    const std::string prefix = fmt::format("image {} ", name);
    if (!message.starts_with(prefix)) throw;
    throw_video(error.code(), name, message.substr(prefix.size()));
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  throw_video(ErrorCode::kOutOfMemory, name,
              "cannot be decoded: out of memory; take fewer frames, or scale it down first");
}

void check_numbers(std::span<const int64_t> frames, const VideoInfo& info) {
  for (size_t i = 0; i < frames.size(); ++i) {
    if (frames[i] < 0 || frames[i] >= info.frames) {
      throw_video(
          ErrorCode::kInvalidArgument, info.name,
          fmt::format("has no frame number {}; it has {}, counted from 0", frames[i], info.frames));
    }
    if (i > 0 && frames[i] < frames[i - 1]) {
      throw_video(ErrorCode::kInvalidArgument, info.name,
                  fmt::format("is read forwards, and frame {} was asked for after frame {}; ask "
                              "in ascending order",
                              frames[i], frames[i - 1]));
    }
  }
}

std::vector<int64_t> distinct_of(std::span<const int64_t> frames) {
  std::vector<int64_t> distinct;
  for (const int64_t frame : frames) {
    if (distinct.empty() || distinct.back() != frame) distinct.push_back(frame);
  }
  return distinct;
}

using OpenAnimation = std::unique_ptr<VideoFile> (*)(std::vector<std::byte> bytes,
                                                     const std::string& name);

/// An animation, whose file is in memory while it is opened and while frames are decoded.
class AnimationFile final : public VideoFile {
 public:
  AnimationFile(RegularFile file, const VideoFile& animation, OpenAnimation open)
      : VideoFile(animation.info(), animation.times_s()), file_(std::move(file)), open_(open) {
    file_.close();
  }

 private:
  void decode_frames(std::span<const int64_t> frames,
                     const std::function<void(Image)>& take) override {
    file_.reopen();
    std::vector<std::byte> bytes = file_.read(0, static_cast<size_t>(file_.bytes()));
    file_.close();
    open_(std::move(bytes), info().name)->decode(frames, take);
  }
  void rest_frames(std::span<const int64_t>) override {}

  RegularFile file_;
  OpenAnimation open_;
};

std::unique_ptr<VideoFile> open_file(const std::filesystem::path& path, const std::string& name) {
  RegularFile file(path, [name](std::string_view found, bool) {
    throw_video(ErrorCode::kCorruptFile, name,
                fmt::format("{}; give the path of a video file or of a folder of frames", found));
  });
  const std::vector<std::byte> head = file.read(0, kHeadBytes);
  if (head.empty()) {
    throw_video(ErrorCode::kCorruptFile, name,
                "is empty (zero bytes) and so has no frame; give a video");
  }
  const std::string_view picture = picture_format(head);
  if (picture != "GIF" && picture != "WebP") {
    // The letters that begin a PNM or TGA may begin anything.
    if (picture.empty() || picture == "PNM" || picture == "TGA") {
      return open_ffmpeg_video(std::move(file), name);
    }
    throw_video(
        ErrorCode::kCorruptFile, name,
        fmt::format(
            "is an image ({}), not a video; give it as an image, or give a folder of frames",
            picture));
  }
  if (file.bytes() > kMaxAnimationBytes) {
    throw_video(ErrorCode::kCorruptFile, name,
                fmt::format("is a {} longer than 1 GiB; cut or scale it down first", picture));
  }
  std::vector<std::byte> bytes = file.read(0, static_cast<size_t>(file.bytes()));
  const OpenAnimation open = picture == "GIF" ? &open_gif_video : &open_webp_video;
  const std::unique_ptr<VideoFile> animation = open(std::move(bytes), name);
  return std::make_unique<AnimationFile>(std::move(file), *animation, open);
}

}  // namespace

void throw_video(ErrorCode code, const std::string& name, std::string_view found) {
  throw Error(code, fmt::format("video {} {}", name, found));
}

std::string with_article(const std::string& format) {
  const bool vowel = std::string_view("aeio").find(format[0]) != std::string_view::npos;
  return (vowel ? "an " : "a ") + format;
}

void throw_no_frame(const std::string& name, std::string_view format) {
  throw_video(ErrorCode::kCorruptFile, name,
              fmt::format("is {} without a frame; give a video of one frame or more",
                          with_article(std::string(format))));
}

void check_frame_size(int64_t height, int64_t width, const std::string& name) {
  if (height * width > kMaxFramePixels) {
    throw_video(ErrorCode::kCorruptFile, name,
                fmt::format("is {} x {}, more than the limit of {} pixels; scale it down first",
                            width, height, kMaxFramePixels));
  }
}

void check_frame_count(int64_t frames, const std::string& name, int64_t most) {
  if (frames > most) {
    throw_video(
        ErrorCode::kCorruptFile, name,
        fmt::format("has more than {} frames, the limit for its format; cut it first", most));
  }
}

void check_animation_pixels(int64_t pixels, const std::string& name) {
  if (pixels > kMaxAnimationPixels) {
    throw_video(ErrorCode::kCorruptFile, name,
                fmt::format("has more than {} pixels in all of its frames, the limit for an "
                            "animation; cut or scale it down first",
                            kMaxAnimationPixels));
  }
}

int64_t animation_delay_ms(int64_t delay_ms) noexcept { return delay_ms < 20 ? 100 : delay_ms; }

void set_duration(VideoInfo& info, int64_t duration_ms) noexcept {
  info.duration_s = seconds_of(duration_ms);
  // One rounding: 30 frames of 100 ms are 10 a second.
  info.fps = static_cast<double>(info.frames * 1000) / static_cast<double>(duration_ms);
}

void warn_of_missing_frames(VideoInfo& info, int64_t missing) {
  const auto all = static_cast<double>(info.frames + missing);
  const double share = static_cast<double>(missing) / all;
  const bool refused = share > kMostMissing;
  const std::string lacking =
      missing > 0 ? fmt::format("{} of {} frames {} missing ({})", missing, info.frames + missing,
                                missing == 1 ? "is" : "are", percent(share))
                  : fmt::format("only its first {} frame{} whole", info.frames,
                                info.frames == 1 ? " is" : "s are");
  const std::string found =
      fmt::format("is {} that ends early{}: {}; copy or download it again",
                  with_article(info.format), refused ? " (truncated)" : "", lacking);
  if (refused) throw_video(ErrorCode::kCorruptFile, info.name, found);
  info.warnings.push_back(fmt::format("video {} {}", info.name, found));
}

void VideoFile::require_kept(std::span<const int64_t> frames) const {
  if (!kept_ || std::ranges::includes(*kept_, frames)) return;
  throw_video(ErrorCode::kInvalidArgument, info_.name,
              "is closed, and a frame that was not kept was asked for; open it again");
}

void VideoFile::decode(std::span<const int64_t> frames, const std::function<void(Image)>& take) {
  check_numbers(frames, info_);
  const std::vector<int64_t> distinct = distinct_of(frames);
  require_kept(distinct);
  size_t next = 0;  // in `frames`
  with_memory(info_.name, [&] {
    decode_frames(distinct, [&](Image image) {
      const int64_t number = frames[next];
      if (image.height != info_.height || image.width != info_.width) {
        throw_video(ErrorCode::kCorruptFile, info_.name,
                    fmt::format("has a frame of another size: frame {} is {} x {}, the first is "
                                "{} x {}; scale all to one size first",
                                number, image.width, image.height, info_.width, info_.height));
      }
      image.name = fmt::format("{} (frame {})", info_.name, number);
      for (++next; next < frames.size() && frames[next] == number; ++next) take(image);
      take(std::move(image));
    });
  });
}

Video VideoFile::read(std::span<const int64_t> frames) {
  const int64_t pixels = int64_t{info_.height} * info_.width;
  if (static_cast<int64_t>(frames.size()) > kMaxReadPixels / pixels) {
    throw_video(ErrorCode::kOutOfMemory, info_.name,
                fmt::format("is {} x {}, and {} frames of that size exceed the limit of {} pixels "
                            "in memory; take fewer frames, or scale it down first",
                            info_.width, info_.height, frames.size(), kMaxReadPixels));
  }
  Video video;
  video.name = info_.name;
  video.fps = info_.fps;
  decode(frames, [&](Image image) { video.frames.push_back(std::move(image)); });
  if (!times_s_.empty()) {
    for (const int64_t frame : frames) {
      video.times_s.push_back(times_s_[static_cast<size_t>(frame)]);
    }
  }
  return video;
}

void VideoFile::rest(std::span<const int64_t> frames) {
  check_numbers(frames, info_);
  std::vector<int64_t> distinct = distinct_of(frames);
  require_kept(distinct);
  rest_frames(distinct);
  kept_ = std::move(distinct);
  times_s_ = std::vector<double>();
}

std::unique_ptr<VideoFile> open_video(const std::filesystem::path& path) {
  const std::string name = shown_name(path.string());
  if (path.native().find('\0') != std::string::npos) {
    throw_video(ErrorCode::kInvalidArgument, name,
                "has a NUL in its name, which no file name can hold; give its path without it");
  }
  return with_memory(name, [&] {
    std::error_code unknown;
    return std::filesystem::is_directory(path, unknown) ? open_frame_folder(path, name)
                                                        : open_file(path, name);
  });
}

}  // namespace kvlm
