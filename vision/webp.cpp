#include <webp/decode.h>

#include <new>

#include "vision/webp_container.h"

namespace kvlm {

namespace {

/// Decodes as many rows of an image that is not whole as there are; returns their number.
double decode_rows(const WebPData& data, WebPDecoderConfig& config) {
  WebPIDecoder* decoder = WebPIDecode(nullptr, 0, &config);
  if (decoder == nullptr) throw std::bad_alloc();
  WebPIUpdate(decoder, data.bytes, data.size);
  int rows = 0;
  if (WebPIDecGetRGB(decoder, &rows, nullptr, nullptr, nullptr) == nullptr) rows = 0;
  WebPIDelete(decoder);
  return rows;
}

}  // namespace

ImageHeader read_webp_header(std::span<const std::byte> bytes, const std::string& name) {
  return read_webp_canvas(open_webp(bytes, name).get());
}

DecodedImage decode_webp(std::span<const std::byte> bytes, const std::string& name) {
  const WebpDemuxer demuxer = open_webp(bytes, name);
  const ImageHeader header = read_webp_canvas(demuxer.get());
  check_size(header.height, header.width, kWebpFormat, name);
  WebPIterator frame;  // the whole picture, or the first of an animation, on a black canvas
  if (WebPDemuxGetFrame(demuxer.get(), 1, &frame) == 0) {
    if (webp_is_cut(bytes)) throw_truncated(kWebpFormat, name);
    throw_damaged(kWebpFormat, name, "it has no image");
  }
  const WebPData data = frame.fragment;
  const int64_t left = frame.x_offset;
  const int64_t top = frame.y_offset;
  const int64_t width = frame.width;
  const int64_t height = frame.height;
  WebPDemuxReleaseIterator(&frame);
  if (left + width > header.width || top + height > header.height) {
    throw_damaged(kWebpFormat, name, "an image in it is larger than its canvas");
  }

  WebPDecoderConfig config;
  if (WebPInitDecoderConfig(&config) == 0)
    throw_unsupported("made for another version of libwebp", name);
  // The container may say another size than the picture itself, which is what will be written.
  const VP8StatusCode features = WebPGetFeatures(data.bytes, data.size, &config.input);
  if (features == VP8_STATUS_NOT_ENOUGH_DATA) throw_truncated(kWebpFormat, name);
  if (features != VP8_STATUS_OK || config.input.width != width || config.input.height != height) {
    throw_damaged(kWebpFormat, name, "its sizes differ");
  }
  DecodedImage result;
  result.orientation = header.orientation;
  const int channels = config.input.has_alpha != 0 ? 4 : 3;
  result.image = allocate_image(header.height, header.width, name, channels);
  const int64_t stride = header.width * channels;
  config.output.colorspace = channels == 4 ? MODE_RGBA : MODE_RGB;
  config.output.is_external_memory = 1;
  config.output.u.RGBA.rgba = result.image.rgb.data() + top * stride + left * channels;
  config.output.u.RGBA.stride = static_cast<int>(stride);
  config.output.u.RGBA.size = static_cast<size_t>((height - 1) * stride + width * channels);
  const VP8StatusCode status = WebPDecode(data.bytes, data.size, &config);
  if (status == VP8_STATUS_OUT_OF_MEMORY) throw std::bad_alloc();
  if (status != VP8_STATUS_OK) {
    const double missing = 1 - decode_rows(data, config) / static_cast<double>(height);
    const bool cut = status == VP8_STATUS_NOT_ENOUGH_DATA || status == VP8_STATUS_SUSPENDED;
    const char* detail = cut ? "" : "its pixels cannot be decoded";
    if (missing <= 0 && !cut) throw_damaged(kWebpFormat, name, detail);
    result.image.warnings = warn_of_missing(missing, kWebpFormat, name, detail);
  }
  if (webp_is_cut(bytes) && result.image.warnings.empty()) {
    result.image.warnings = warn_of_missing_end(kWebpFormat, name);
  }
  return result;
}

}  // namespace kvlm
