#include <fmt/format.h>
#include <webp/demux.h>

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "vision/decoders.h"
#include "vision/video_sources.h"
#include "vision/webp_container.h"

namespace kvlm {

namespace {

// libwebp looks for every frame from the first on.
constexpr int64_t kMaxFrames = int64_t{1} << 15;

struct AnimationDeleter {
  void operator()(WebPAnimDecoder* decoder) const noexcept { WebPAnimDecoderDelete(decoder); }
};
using Animation = std::unique_ptr<WebPAnimDecoder, AnimationDeleter>;

class WebpVideo : public VideoFile {
 public:
  WebpVideo(VideoInfo info, std::vector<double> times_s, std::vector<std::byte> bytes,
            const ImageHeader& canvas)
      : VideoFile(std::move(info), std::move(times_s)), bytes_(std::move(bytes)), canvas_(canvas) {}

 private:
  void decode_frames(std::span<const int64_t> frames,
                     const std::function<void(Image)>& take) override {
    const WebPData file{reinterpret_cast<const uint8_t*>(bytes_.data()), bytes_.size()};
    const Animation animation(WebPAnimDecoderNew(&file, nullptr));
    if (animation == nullptr) throw std::bad_alloc();  // its container was read before
    int64_t drawn = 0;
    uint8_t* rgba = nullptr;  // the decoder's
    for (const int64_t frame : frames) {
      for (; drawn <= frame; ++drawn) {
        int end_ms = 0;
        if (WebPAnimDecoderGetNext(animation.get(), &rgba, &end_ms) == 0) {
          throw_damaged(kWebpFormat, info().name, fmt::format("frame {} cannot be decoded", drawn));
        }
      }
      take(picture(rgba));
    }
  }

  Image picture(const uint8_t* rgba) const {
    Image image = allocate_image(canvas_.height, canvas_.width, info().name);
    for (auto out = image.rgb.begin(); out != image.rgb.end(); out += 3, rgba += 4) {
      std::copy_n(rgba, 3, out);  // alpha is dropped, as from other formats
    }
    return apply_orientation(std::move(image), canvas_.orientation);
  }

  /// open_video() lets go of all of it.
  void rest_frames(std::span<const int64_t>) override {}

  std::vector<std::byte> bytes_;
  ImageHeader canvas_;  // as stored
};

/// Makes a whole file of its first `end` bytes, where a frame ends: the decoder takes no other.
void cut_webp(std::vector<std::byte>& bytes, size_t end) {
  bytes.resize(end);
  bytes.resize(end + end % 2);  // chunks are padded
  for (size_t i = 0; i < 4; ++i) {
    bytes[4 + i] = static_cast<std::byte>((bytes.size() - kRiffHeaderBytes) >> 8 * i);
  }
}

}  // namespace

std::unique_ptr<VideoFile> open_webp_video(std::vector<std::byte> bytes, const std::string& name) {
  WebpDemuxer demuxer = open_webp(bytes, name);
  const ImageHeader canvas = read_webp_canvas(demuxer.get());
  check_size(canvas.height, canvas.width, kWebpFormat, name);
  check_frame_size(canvas.height, canvas.width, name);
  check_frame_count(WebPDemuxGetI(demuxer.get(), WEBP_FF_FRAME_COUNT), name, kMaxFrames);
  VideoInfo info{.name = name, .format = kWebpFormat};
  std::vector<double> times_s;
  int64_t duration_ms = 0;
  const auto* file = reinterpret_cast<const uint8_t*>(bytes.data());
  size_t end = 0;  // of the last frame that is whole
  WebPIterator frame;
  for (int more = WebPDemuxGetFrame(demuxer.get(), 1, &frame); more != 0;
       more = WebPDemuxNextFrame(&frame)) {
    if (frame.complete == 0) break;
    end = static_cast<size_t>(frame.fragment.bytes + frame.fragment.size - file);
    times_s.push_back(seconds_of(duration_ms));
    duration_ms += animation_delay_ms(frame.duration);
    ++info.frames;
  }
  WebPDemuxReleaseIterator(&frame);
  const bool whole = WebPDemuxGetI(demuxer.get(), WEBP_FF_FRAME_COUNT) == info.frames;
  demuxer.reset();
  if (webp_is_cut(bytes)) {
    if (info.frames == 0) throw_truncated(kWebpFormat, name);
    warn_of_missing_frames(info, 0);
    cut_webp(bytes, end);
  } else if (!whole) {
    throw_damaged(kWebpFormat, name, "its chunks do not fit together");
  }
  if (info.frames == 0) throw_no_frame(name, kWebpFormat);
  // The decoder goes over the whole canvas for every frame.
  check_animation_pixels(info.frames * canvas.height * canvas.width, name);
  info.height = static_cast<int>(canvas.height);
  info.width = static_cast<int>(canvas.width);
  if (is_transposed(canvas.orientation)) std::swap(info.height, info.width);
  set_duration(info, duration_ms);
  return std::make_unique<WebpVideo>(std::move(info), std::move(times_s), std::move(bytes), canvas);
}

}  // namespace kvlm
