#include <webp/decode.h>

#include <new>

#include "vision/webp_container.h"

namespace kvlm {

ImageHeader read_webp_header(std::span<const std::byte> bytes, const std::string& name) {
  return read_webp_canvas(open_webp(bytes, name).get());
}

DecodedImage decode_webp(std::span<const std::byte> bytes, const std::string& name) {
  const WebpDemuxer demuxer = open_webp(bytes, name);
  const ImageHeader header = read_webp_canvas(demuxer.get());
  check_size(header.height, header.width, kWebpFormat, name);
  WebPIterator frame;  // the whole picture, or the first of an animation, on a black canvas
  if (WebPDemuxGetFrame(demuxer.get(), 1, &frame) == 0) {
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
  if (WebPGetFeatures(data.bytes, data.size, &config.input) != VP8_STATUS_OK ||
      config.input.width != width || config.input.height != height) {
    throw_damaged(kWebpFormat, name, "its sizes differ");
  }
  DecodedImage result;
  result.orientation = header.orientation;
  result.image = allocate_image(header.height, header.width, name);
  const int64_t stride = header.width * 3;
  config.output.colorspace = MODE_RGB;  // alpha is dropped, as from other formats
  config.output.is_external_memory = 1;
  config.output.u.RGBA.rgba = result.image.rgb.data() + top * stride + left * 3;
  config.output.u.RGBA.stride = static_cast<int>(stride);
  config.output.u.RGBA.size = static_cast<size_t>((height - 1) * stride + width * 3);
  switch (WebPDecode(data.bytes, data.size, &config)) {
    case VP8_STATUS_OK:
      return result;
    case VP8_STATUS_OUT_OF_MEMORY:
      throw std::bad_alloc();
    case VP8_STATUS_NOT_ENOUGH_DATA:
    case VP8_STATUS_SUSPENDED:
      throw_truncated(kWebpFormat, name);
    default:
      throw_damaged(kWebpFormat, name, "its pixels cannot be decoded");
  }
}

}  // namespace kvlm
