#include "vision/ffmpeg/picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <new>

extern "C" {
#include <libavutil/opt.h>
#include <libavutil/pixdesc.h>
#include <libswscale/swscale.h>
}

#include "kernels/base/printable.h"
#include "vision/decoders.h"
#include "vision/video_sources.h"

namespace kvlm {

namespace {

/// The matrices that libswscale knows, by the numbers that both use; others would be read as
/// BT.601.
constexpr std::array kMatrices = {AVCOL_SPC_RGB,       AVCOL_SPC_BT709,     AVCOL_SPC_UNSPECIFIED,
                                  AVCOL_SPC_FCC,       AVCOL_SPC_BT470BG,   AVCOL_SPC_SMPTE170M,
                                  AVCOL_SPC_SMPTE240M, AVCOL_SPC_BT2020_NCL};

bool same_kind(const AVFrame& a, const AVFrame& b) noexcept {
  return a.width == b.width && a.height == b.height && a.format == b.format &&
         a.colorspace == b.colorspace && a.color_range == b.color_range;
}

/// Formats that say by their name that they use the full range.
bool is_full_range(const AVFrame& frame) noexcept {
  return frame.color_range == AVCOL_RANGE_JPEG || frame.format == AV_PIX_FMT_YUVJ420P ||
         frame.format == AV_PIX_FMT_YUVJ422P || frame.format == AV_PIX_FMT_YUVJ444P ||
         frame.format == AV_PIX_FMT_YUVJ440P || frame.format == AV_PIX_FMT_YUVJ411P;
}

}  // namespace

void FfmpegPicture::FreeScaler::operator()(SwsContext* scaler) const noexcept {
  sws_freeContext(scaler);
}

void FfmpegPicture::prepare(const AVFrame& frame) {
  const auto format = static_cast<AVPixelFormat>(frame.format);
  if (sws_isSupportedInput(format) == 0 ||
      std::ranges::find(kMatrices, frame.colorspace) == kMatrices.end()) {
    const char* pixels = av_get_pix_fmt_name(format);
    const char* matrix = av_color_space_name(frame.colorspace);
    throw_video(
        ErrorCode::kUnsupported, name_,
        fmt::format("has pixels of an unsupported kind ({}, {}); convert it to H.264 with yuv420p",
                    printable(pixels != nullptr ? pixels : "unnamed"),
                    printable(matrix != nullptr ? matrix : "unnamed")));
  }
  scaler_.reset(sws_alloc_context());
  if (scaler_ == nullptr) throw std::bad_alloc();
  const std::array<std::pair<const char*, int64_t>, 7> options = {
      {{"srcw", frame.width},
       {"srch", frame.height},
       {"src_format", format},
       {"dstw", frame.width},
       {"dsth", frame.height},
       {"dst_format", AV_PIX_FMT_RGB24},
       {"sws_flags", SWS_BILINEAR | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INT | SWS_BITEXACT}}};
  for (const auto& [key, value] : options) av_opt_set_int(scaler_.get(), key, value, 0);
  av_opt_set(scaler_.get(), "sws_dither", "none", 0);
  const int* matrix = sws_getCoefficients(frame.colorspace);
  constexpr int kOne = 1 << 16;  // contrast and saturation as they are
  sws_setColorspaceDetails(scaler_.get(), matrix, is_full_range(frame) ? 1 : 0, matrix, 1, 0, kOne,
                           kOne);
  if (sws_init_context(scaler_.get(), nullptr, nullptr) < 0) throw std::bad_alloc();

  rgb_.reset(av_frame_alloc());
  like_.reset(av_frame_alloc());
  if (rgb_ == nullptr || like_ == nullptr) throw std::bad_alloc();
  rgb_->width = like_->width = frame.width;
  rgb_->height = like_->height = frame.height;
  rgb_->format = AV_PIX_FMT_RGB24;
  like_->format = frame.format;
  like_->colorspace = frame.colorspace;
  like_->color_range = frame.color_range;
  // With rows as long as vector instructions like them, which write behind the last pixel.
  if (av_frame_get_buffer(rgb_.get(), 0) < 0) throw std::bad_alloc();
}

Image FfmpegPicture::convert(const AVFrame& frame) {
  check_size(frame.height, frame.width, "video", name_);
  if (like_ == nullptr || !same_kind(frame, *like_)) prepare(frame);
  if (sws_scale(scaler_.get(), frame.data, frame.linesize, 0, frame.height, rgb_->data,
                rgb_->linesize) != frame.height) {
    throw std::bad_alloc();
  }
  Image image = allocate_image(frame.height, frame.width, name_);
  const auto row_bytes = int64_t{frame.width} * 3;
  for (int64_t y = 0; y < frame.height; ++y) {
    std::copy_n(rgb_->data[0] + y * rgb_->linesize[0], row_bytes, image.rgb.data() + y * row_bytes);
  }
  return apply_orientation(std::move(image), orientation_);
}

int orientation_of(const AVStream& stream) noexcept {
  const auto* matrix = reinterpret_cast<const int32_t*>(
      av_stream_get_side_data(&stream, AV_PKT_DATA_DISPLAYMATRIX, nullptr));
  if (matrix == nullptr) return 1;
  // A pixel at (x, y) is shown at (a x + c y, b x + d y).
  const int32_t a = matrix[0];
  const int32_t b = matrix[1];
  const int32_t c = matrix[3];
  const int32_t d = matrix[4];
  if (b == 0 && c == 0 && a != 0 && d != 0) {
    return d > 0 ? (a > 0 ? 1 : 2) : (a > 0 ? 4 : 3);
  }
  if (a == 0 && d == 0 && b != 0 && c != 0) {
    return b > 0 ? (c > 0 ? 5 : 6) : (c > 0 ? 8 : 7);
  }
  return 1;
}

}  // namespace kvlm
