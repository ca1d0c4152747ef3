#include <webp/decode.h>
#include <webp/demux.h>

#include <memory>
#include <new>
#include <optional>

#include "vision/decoders.h"
#include "vision/exif.h"

namespace kvlm {

namespace {

constexpr char kFormat[] = "WebP";
constexpr size_t kRiffHeaderBytes = 8;

struct DemuxDeleter {
  void operator()(WebPDemuxer* demuxer) const noexcept { WebPDemuxDelete(demuxer); }
};
using Demuxer = std::unique_ptr<WebPDemuxer, DemuxDeleter>;

/// Reads the container: sizes, frames and where the metadata are; no pixel.
Demuxer open_container(std::span<const std::byte> bytes, const std::string& name) {
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  if (bytes.size() < kRiffHeaderBytes) throw_truncated(kFormat, name);
  uint64_t said = kRiffHeaderBytes;
  for (size_t i = 0; i < 4; ++i) said += uint64_t{data[4 + i]} << 8 * i;
  if (said > bytes.size()) throw_truncated(kFormat, name);
  const WebPData file{data, bytes.size()};
  Demuxer demuxer(WebPDemux(&file));
  if (demuxer == nullptr) throw_damaged(kFormat, name, "its parts do not fit together");
  return demuxer;
}

/// The first metadata chunk of that name; empty without one.
std::span<const std::byte> metadata(const WebPDemuxer* demuxer, const char* chunk_name) {
  WebPChunkIterator chunk;
  std::span<const std::byte> data;  // points into the file
  if (WebPDemuxGetChunk(demuxer, chunk_name, 1, &chunk) != 0) {
    data = std::as_bytes(std::span(chunk.chunk.bytes, chunk.chunk.size));
  }
  WebPDemuxReleaseChunkIterator(&chunk);
  return data;
}

ImageHeader read_header(const WebPDemuxer* demuxer) {
  std::optional<int> orientation = exif_orientation(metadata(demuxer, "EXIF"));
  if (!orientation) orientation = xmp_orientation(metadata(demuxer, "XMP "));
  return {.height = WebPDemuxGetI(demuxer, WEBP_FF_CANVAS_HEIGHT),
          .width = WebPDemuxGetI(demuxer, WEBP_FF_CANVAS_WIDTH),
          .orientation = orientation.value_or(1)};
}

}  // namespace

ImageHeader read_webp_header(std::span<const std::byte> bytes, const std::string& name) {
  return read_header(open_container(bytes, name).get());
}

DecodedImage decode_webp(std::span<const std::byte> bytes, const std::string& name) {
  const Demuxer demuxer = open_container(bytes, name);
  const ImageHeader header = read_header(demuxer.get());
  check_size(header.height, header.width, kFormat, name);
  WebPIterator frame;  // the whole picture, or the first of an animation, on a black canvas
  if (WebPDemuxGetFrame(demuxer.get(), 1, &frame) == 0) {
    throw_damaged(kFormat, name, "it has no picture");
  }
  const WebPData data = frame.fragment;
  const int64_t left = frame.x_offset;
  const int64_t top = frame.y_offset;
  const int64_t width = frame.width;
  const int64_t height = frame.height;
  WebPDemuxReleaseIterator(&frame);
  if (left + width > header.width || top + height > header.height) {
    throw_damaged(kFormat, name, "a picture of it is larger than all of it");
  }

  WebPDecoderConfig config;
  if (WebPInitDecoderConfig(&config) == 0) throw_unsupported("for another libwebp", name);
  // The container may say another size than the picture itself, which is what will be written.
  if (WebPGetFeatures(data.bytes, data.size, &config.input) != VP8_STATUS_OK ||
      config.input.width != width || config.input.height != height) {
    throw_damaged(kFormat, name, "its sizes differ");
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
      throw_truncated(kFormat, name);
    default:
      throw_damaged(kFormat, name, "its pixels cannot be decoded");
  }
}

}  // namespace kvlm
