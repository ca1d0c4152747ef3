#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "vision/decoders.h"
#include "vision/gif_blocks.h"
#include "vision/video_sources.h"

// An animated GIF as a video: each frame is drawn on the canvas by Pillow's rules, which decide
// what is transparent and what an area is restored to.
namespace kvlm {

namespace {

using Colour = std::array<uint8_t, 3>;

/// The pixels of an area of the canvas.
struct Patch {
  GifArea area;
  std::vector<uint8_t> rgb;  // (height, width, 3)
};

/// The canvas as Pillow's GifImageFile keeps it: its rules for what is transparent, what an area
/// becomes before the next picture, and which index names the background differ in places from
/// what browsers do.
class GifCanvas {
 public:
  GifCanvas(std::span<const std::byte> bytes, const VideoInfo& info)
      : reader_(bytes, info.name), info_(info) {}

  /// Draws the next picture.
  void advance() {
    const std::optional<GifFrame> frame = reader_.next();
    if (!frame) throw_truncated(kGifFormat, info_.name);  // it was there when it was opened
    reader_.skip_codes();
    if (drawn_ > 0) dispose();
    const Palette palette = palette_of(*frame);
    if (drawn_ == 0) {
      canvas_ = allocate_image(info_.height, info_.width, info_.name);
      fill(whole(), palette.colours[frame->transparent.value_or(0)]);
      grey_ = !frame->palette && !reader_.palette();
      first_transparent_ = frame->transparent;
    }
    grey_ = grey_ && palette.size == 0;
    if (frame->disposal != GifDisposal::kUnstated) disposal_ = frame->disposal;
    prepare_disposal(*frame, palette);
    draw(*frame, palette.colours);
    ++drawn_;
  }
  int64_t drawn() const noexcept { return drawn_; }
  const Image& image() const noexcept { return canvas_; }

 private:
  struct Palette {
    GifPalette colours;
    size_t size;  // 0: greys, of which there are all
  };

  Palette palette_of(const GifFrame& frame) const {
    if (frame.palette) return {*frame.palette, frame.colours};
    const bool global = reader_.palette() && (!frame.greys || drawn_ == 0);
    return global ? Palette{*reader_.palette(), reader_.colours()} : Palette{grey_palette(), 0};
  }

  GifArea whole() const noexcept { return {0, 0, info_.width, info_.height}; }

  uint8_t* row(int top, int left) noexcept {
    return canvas_.rgb.data() + (int64_t{top} * info_.width + left) * 3;
  }

  void fill(const GifArea& area, const Colour& colour) noexcept {
    for (int y = 0; y < area.height; ++y) {
      uint8_t* out = row(area.top + y, area.left);
      for (int x = 0; x < area.width; ++x, out += 3) std::ranges::copy(colour, out);
    }
  }

  void draw(const GifFrame& frame, const GifPalette& colours) {
    const std::vector<uint8_t> indices = decode_gif_codes(frame, info_.name);
    const uint8_t* index = indices.data();
    for (int y = 0; y < frame.area.height; ++y) {
      uint8_t* out = row(frame.area.top + y, frame.area.left);
      for (int x = 0; x < frame.area.width; ++x, ++index, out += 3) {
        if (frame.transparent != *index) std::ranges::copy(colours[*index], out);
      }
    }
  }

  /// Notes what the area of `frame` becomes once it has been shown.
  void prepare_disposal(const GifFrame& frame, const Palette& palette) {
    background_.reset();
    previous_.reset();
    area_ = frame.area;
    if (disposal_ == GifDisposal::kBackground) {
      background_ = background_colour(frame, palette);
    } else if (disposal_ == GifDisposal::kPrevious && drawn_ > 0) {
      Patch patch{frame.area, {}};
      for (int y = 0; y < frame.area.height; ++y) {
        const uint8_t* in = row(frame.area.top + y, frame.area.left);
        patch.rgb.insert(patch.rgb.end(), in, in + int64_t{frame.area.width} * 3);
      }
      previous_ = std::move(patch);
    } else if (disposal_ == GifDisposal::kPrevious && frame.transparent) {
      background_ = palette.colours[*frame.transparent];
    }
  }

  Colour background_colour(const GifFrame& frame, const Palette& palette) const {
    std::optional<uint8_t> index = frame.transparent;
    if (grey_ && first_transparent_) index = first_transparent_;
    const size_t colour = index.value_or(reader_.background());
    // From the second picture on, an index that the palette lacks is its first.
    const bool lacking = drawn_ > 0 && palette.size > 0 && colour >= palette.size;
    return palette.colours[lacking ? 0 : colour];
  }

  void dispose() noexcept {
    if (background_) fill(area_, *background_);
    if (!previous_) return;
    const uint8_t* in = previous_->rgb.data();
    const auto bytes = int64_t{area_.width} * 3;
    for (int y = 0; y < area_.height; ++y, in += bytes) {
      std::copy_n(in, bytes, row(area_.top + y, area_.left));
    }
  }

  GifReader reader_;
  const VideoInfo& info_;
  Image canvas_;
  int64_t drawn_ = 0;
  bool grey_ = false;  // no picture so far had a palette that is needed
  std::optional<uint8_t> first_transparent_;
  GifDisposal disposal_ = GifDisposal::kUnstated;  // one that is unstated is that of the last
  GifArea area_;                                   // of the last picture
  std::optional<Colour> background_;
  std::optional<Patch> previous_;
};

class GifVideo : public VideoFile {
 public:
  GifVideo(VideoInfo info, std::vector<double> times_s, std::vector<std::byte> bytes)
      : VideoFile(std::move(info), std::move(times_s)), bytes_(std::move(bytes)) {}

 private:
  void decode_frames(std::span<const int64_t> frames,
                     const std::function<void(Image)>& take) override {
    GifCanvas canvas(bytes_, info());
    for (const int64_t frame : frames) {
      while (canvas.drawn() <= frame) canvas.advance();
      take(canvas.image());
    }
  }

  /// open_video() lets go of all of it.
  void rest_frames(std::span<const int64_t>) override {}

  std::vector<std::byte> bytes_;
};

/// The next frame of which all is there. A file that ends within one gets a warning, after the
/// first.
std::optional<GifFrame> next_whole(GifReader& reader, VideoInfo& info) {
  try {
    std::optional<GifFrame> frame = reader.next();
    if (frame) reader.skip_codes();
    return frame;
  } catch (const Error&) {  // truncated
    if (info.frames == 0) throw;
    warn_of_missing_frames(info, 0);
    return std::nullopt;
  }
}

}  // namespace

std::unique_ptr<VideoFile> open_gif_video(std::vector<std::byte> bytes, const std::string& name) {
  VideoInfo info{.name = name, .format = kGifFormat};
  std::vector<double> times_s;
  GifReader reader(bytes, name);
  int64_t height = reader.height();
  int64_t width = reader.width();
  int64_t pixels = 0;
  int64_t duration_ms = 0;
  while (const std::optional<GifFrame> frame = next_whole(reader, info)) {
    const GifArea& area = frame->area;
    if (info.frames == 0) {  // the first picture may extend the canvas
      height = std::max<int64_t>(height, area.top + area.height);
      width = std::max<int64_t>(width, area.left + area.width);
      check_size(height, width, kGifFormat, name);
      check_frame_size(height, width, name);
    }
    if (area.top + area.height > height || area.left + area.width > width) {
      throw_video(
          ErrorCode::kCorruptFile, name,
          fmt::format("has a frame of another size: frame {} reaches to {} x {}, and those "
                      "before are {} x {}; scale all to one size first",
                      info.frames, area.left + area.width, area.top + area.height, width, height));
    }
    times_s.push_back(seconds_of(duration_ms));
    duration_ms += animation_delay_ms(int64_t{frame->delay_cs} * 10);
    check_frame_count(++info.frames, name);
    pixels += int64_t{area.height} * area.width;
    check_animation_pixels(pixels, name);
  }
  if (info.frames == 0) throw_no_frame(name, kGifFormat);
  info.height = static_cast<int>(height);
  info.width = static_cast<int>(width);
  set_duration(info, duration_ms);
  return std::make_unique<GifVideo>(std::move(info), std::move(times_s), std::move(bytes));
}

}  // namespace kvlm
